"""What the planner and its simulations take from inside the library: every such name, from here alone."""

from penstock.blueprint import Blueprint, PrepareRequest, draw_blueprint, request_for
from penstock.build import build
from penstock.engine.forward_backward.gather import packed_bytes
from penstock.engine.unit.dtensor import divided_over, is_divided, own_elements, spec_of, wrapped
from penstock.engine.unit.first_values import FirstValues, FlatValues
from penstock.engine.unit.partition import ROOT, UnitSpec
from penstock.engine.unit.plan import UnitPlan
from penstock.memory_budget import MemoryBudget, Resources, budget_of, gradient_bytes, host_memory
from penstock.planned import check_elementwise
from penstock.recompute import can_be_told, recomputes, tell
from penstock.rules.rule import noting
from penstock.runtime.collectives import Collectives, Hop
from penstock.runtime.control_group import ControlGroup, control_group_of_all
from penstock.runtime.hardware import device_for, free_device_memory, shares_host_memory
from penstock.runtime.host_memory import Arena, HostMemory
from penstock.runtime.modes import user_mode
from penstock.runtime.streams import COLLECTIVE, ON_DEVICE, Event, Streams, Work
from penstock.runtime.system import hosts_of
from penstock.runtime.topology import Grid, Reach, grid_of, node_size
from penstock.tiers.host import HostTier
from penstock.tiers.nvme import Striping
from penstock.tiers.staging import LEAST_FILE_SLOTS, RING_BYTES
from penstock.tiers.storage import MemorySegment, Records, Segment, SegmentPlan, record_sizes
from penstock.tiers.tier import Allocation, TierMemory
