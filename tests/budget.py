"""What each file of tests may cost, in CPU seconds: in `make test`, and in `make test-thorough`.

Two cores do 720 of them in the 6 minutes that `make test` is to take, and 960 in the 8 of `make test-thorough`: the
budgets, which are of a busy machine and in part of estimates, are to come down to that. A file that has grown gets
cheaper rows, or marks some `thorough`, before it gets a larger budget.
"""

from collections.abc import Mapping
from dataclasses import dataclass

QUICK_SECONDS, THOROUGH_SECONDS = 2200, 2913  # of all files together; what they take on a quiet machine is less

#: Of files that are not in `BUDGETS`: of each, and of all of them together.
SMALL_SECONDS = 3.0
REST = (80.0, 20.0)


@dataclass
class Costs:
    """CPU seconds of the rows that are not marked `thorough`, and of those that are."""

    quick: float = 0.0
    thorough: float = 0.0

    def add(self, seconds: float, thorough: bool) -> None:
        if thorough:
            self.thorough += seconds
        else:
            self.quick += seconds


#: By file, below `tests/`: of `make test`, and of `make test-thorough`.
BUDGETS: dict[str, tuple[float, float]] = {
    "device/test_budgets.py": (12, 0),
    "device/test_gpu_suite.py": (36, 35),
    "device/test_later.py": (3, 40),
    "device/test_plan_times.py": (9, 0),
    "device/test_probe.py": (6, 0),
    "device/test_promises.py": (22, 40),
    "device/test_ranks.py": (18, 10),
    "device/test_simulation.py": (20, 30),
    "device/test_schedule.py": (14, 0),
    "device/test_streams.py": (10, 3),
    "device/test_strictness.py": (5, 0),
    "device/test_waits.py": (4, 23),
    "distributed/test_agreement.py": (9, 0),
    "distributed/test_auto.py": (7, 0),
    "distributed/test_budgets.py": (8, 0),
    "distributed/test_counts.py": (5, 0),
    "distributed/test_divided_beginnings.py": (13, 5),
    "distributed/test_divided_checkpoints.py": (12, 8),
    "distributed/test_divided_parameters.py": (21, 70),
    "distributed/test_divided_plan.py": (10, 18),
    "distributed/test_dynamic.py": (6, 95),
    "distributed/test_engines.py": (12, 4),
    "distributed/test_groups.py": (14, 21),
    "distributed/test_handles.py": (5, 0),
    "distributed/test_hosts.py": (8, 0),
    "distributed/test_looking.py": (5, 0),
    "distributed/test_order.py": (10, 5),
    "distributed/test_out_of_step.py": (10, 0),
    "distributed/test_packed.py": (14, 10),
    "distributed/test_packed_state.py": (13, 5),
    "distributed/test_probe.py": (7, 0),
    "distributed/test_reads.py": (10, 6),
    "distributed/test_simulation.py": (23, 6),
    "distributed/test_resharding.py": (12, 20),
    "distributed/test_secondary.py": (29, 125),
    "distributed/test_silent_ranks.py": (9, 0),
    "distributed/test_sums.py": (20, 25),
    "distributed/test_tensor_parallel.py": (32, 40),
    "distributed/test_volume.py": (7, 10),
    "distributed/test_whole.py": (36, 60),
    "docs/test_commands.py": (6, 0),
    "docs/test_errors_page.py": (7, 0),
    "docs/test_python.py": (20, 0),
    "docs/test_run.py": (21, 95),
    "docs/test_site.py": (10, 20),
    "faults/test_aio.py": (10, 8),
    "faults/test_checkpoint_crash.py": (15, 22),
    "faults/test_disks.py": (12, 8),
    "faults/test_exits.py": (15, 17),
    "faults/test_probe.py": (5, 2),
    "faults/test_ranks.py": (1, 10),
    "faults/test_training.py": (8, 40),
    "gpu/test_loops.py": (6, 0),
    "gpu/test_parity.py": (4, 9),
    "gpu/test_pinned.py": (11, 0),
    "gpu/test_train.py": (9, 0),
    "hosts/test_two_hosts.py": (48, 42),
    "install/test_wheel.py": (12, 0),
    "meta/test_examples.py": (7, 7),
    "meta/test_gpu_check.py": (10, 13),
    "meta/test_layers.py": (10, 0),
    "meta/test_recipes.py": (6, 0),
    "meta/test_sizes.py": (6, 0),
    "models/test_adapters.py": (10, 50),
    "models/test_checkpointing.py": (9, 9),
    "models/test_chunked.py": (12, 0),
    "models/test_compile.py": (13, 52),
    "models/test_failures.py": (4, 0),
    "models/test_drawn.py": (4, 19),
    "models/test_families.py": (9, 55),
    "models/test_generation.py": (6, 12),
    "models/test_fake_families.py": (9, 6),
    "models/test_inference.py": (6, 12),
    "models/test_lora.py": (9, 16),
    "models/test_memory.py": (5, 30),
    "models/test_planning.py": (10, 60),
    "models/test_sequence_families.py": (9, 42),
    "models/test_sequence_parallel.py": (20, 14),
    "models/test_two_ranks.py": (5, 84),
    "models/test_untrained.py": (9, 14),
    "native/test_digests.py": (0, 25),
    "parity/test_access.py": (3, 87),
    "parity/test_accumulation.py": (13, 15),
    "parity/test_averages.py": (9, 5),
    "parity/test_combinations.py": (5, 22),
    "parity/test_nvme.py": (22, 16),
    "parity/test_overlap_modes.py": (10, 11),
    "parity/test_pageable.py": (7, 12),
    "parity/test_simulation.py": (32, 32),
    "parity/test_resume.py": (20, 45),
    "parity/test_rules_parity.py": (14, 10),
    "parity/test_simulated.py": (9, 15),
    "parity/test_split.py": (19, 22),
    "parity/test_streamed.py": (15, 35),
    "parity/test_unfreezing.py": (10, 12),
    "parity/test_waits.py": (14, 90),
    "parity/test_whole.py": (33, 5),
    "parity/test_whole_states.py": (30, 12),
    "parity/test_world_size_1.py": (14, 40),
    "parity/test_world_size_2.py": (31, 40),
    "property/test_checkpoint_files.py": (9, 34),
    "property/test_foreign_files.py": (7, 1),
    "property/test_moves.py": (4, 17),
    "property/test_programmes.py": (5, 90),
    "property/test_retiming.py": (5, 0),
    "property/test_sequences.py": (9, 6),
    "train/test_as_trl.py": (36, 16),
    "train/test_outcome.py": (24, 3),
    "train/test_page.py": (4, 0),
    "train/test_refusals.py": (20, 0),
    "train/test_resume.py": (38, 3),
    "train/test_signals.py": (12, 3),
    "train/test_torchrun.py": (0, 150),
    "unit/checkpoint/test_export.py": (13, 5),
    "unit/checkpoint/test_hostile.py": (4, 0),
    "unit/checkpoint/test_sharing.py": (5, 0),
    "unit/cli/page/test_browser.py": (16, 6),
    "unit/cli/page/test_report.py": (8, 0),
    "unit/integrations/test_families.py": (6, 6),
    "unit/cli/test_hostile_options.py": (8, 18),
    "unit/cli/test_json.py": (8, 0),
    "unit/cli/test_plan.py": (7, 0),
    "unit/cli/test_surface.py": (5, 0),
    "unit/engine/test_access.py": (6, 0),
    "unit/engine/test_activations.py": (12, 8),
    "unit/engine/test_adopting.py": (4, 0),
    "unit/engine/test_averages.py": (4, 0),
    "unit/engine/test_border.py": (8, 51),
    "unit/engine/test_clip.py": (7, 0),
    "unit/engine/test_dynamic.py": (8, 4),
    "unit/engine/test_engines.py": (6, 2),
    "unit/engine/test_fractions.py": (5, 0),
    "unit/engine/test_handles.py": (4, 3),
    "unit/engine/test_hiding.py": (2, 5),
    "unit/engine/test_interrupted.py": (12, 20),
    "unit/engine/test_kept.py": (6, 0),
    "unit/engine/test_loading.py": (6, 0),
    "unit/engine/test_memory.py": (11, 9),
    "unit/engine/test_mistakes.py": (4, 0),
    "unit/engine/test_nvme.py": (7, 0),
    "unit/engine/test_overlap.py": (5, 2),
    "unit/engine/test_overlap_backward.py": (12, 19),
    "unit/engine/test_recording.py": (11, 0),
    "unit/engine/test_released.py": (9, 0),
    "unit/engine/test_residency.py": (22, 99),
    "unit/engine/test_saving.py": (11, 0),
    "unit/engine/test_several.py": (4, 0),
    "unit/engine/test_tracing.py": (8, 0),
    "unit/engine/test_under_way.py": (4, 6),
    "unit/engine/test_versions.py": (4, 0),
    "unit/engine/test_weights.py": (9, 0),
    "unit/engine/test_weights_memory.py": (5, 0),
    "unit/integrations/test_chunked.py": (5, 0),
    "unit/integrations/test_dcp.py": (6, 0),
    "unit/integrations/test_pickled.py": (7, 0),
    "unit/integrations/test_speed.py": (4, 0),
    "unit/integrations/test_merging.py": (4, 0),
    "unit/integrations/test_vocabulary.py": (4, 0),
    "unit/machine/test_nodes.py": (4, 0),
    "unit/planner/test_plan_result.py": (7, 0),
    "unit/planner/test_mesh_models.py": (6, 0),
    "unit/planner/test_plan.py": (15, 0),
    "unit/planner/test_plan_request.py": (4, 0),
    "unit/planner/test_search.py": (6, 30),
    "unit/planner/test_trials.py": (4, 0),
    "unit/planner/test_workload.py": (4, 0),
    "unit/probe/test_measure.py": (5, 6),
    "unit/simulation/test_fake_collectives.py": (4, 0),
    "unit/simulation/test_leaves_nothing.py": (5, 0),
    "unit/simulation/test_real_operations.py": (4, 0),
    "unit/simulation/test_fake_operations.py": (5, 0),
    "unit/simulation/test_expected_values.py": (5, 0),
    "unit/rules/test_against_torch.py": (5, 0),
    "unit/rules/test_back_ends.py": (9, 0),
    "unit/rules/test_device.py": (9, 12),
    "unit/rules/test_generic.py": (9, 0),
    "unit/rules/test_hard_inputs.py": (7, 4),
    "unit/rules/test_large.py": (5, 6),
    "unit/rules/test_many.py": (5, 0),
    "unit/rules/test_on_device.py": (3, 25),
    "unit/rules/test_pool.py": (7, 0),
    "unit/rules/test_registered.py": (4, 0),
    "unit/rules/test_whole.py": (5, 0),
    "unit/rules/test_wire.py": (4, 0),
    "unit/test_budgets.py": (4, 4),
    "unit/test_closure.py": (4, 1),
    "unit/test_footprint.py": (4, 0),
    "unit/test_inference_handle.py": (6, 2),
    "unit/test_layout.py": (4, 0),
    "unit/test_optim.py": (4, 0),
    "unit/test_optimizer_handle.py": (19, 0),
    "unit/test_strict_building.py": (7, 0),
    "unit/test_strict_harness.py": (14, 0),
    "unit/test_trace.py": (3, 0),
    "unit/tiers/test_bounce.py": (3, 0),
    "unit/train/test_data.py": (5, 0),
    "unit/train/test_fit.py": (7, 0),
    "unit/train/test_masks.py": (4, 0),
    "unit/train/test_model.py": (4, 0),
    "unit/train/test_run_file.py": (8, 0),
    "unit/train/test_signals.py": (6, 0),
    "unit/train/test_tokenize.py": (5, 0),
    "unit/train/test_training_templates.py": (4, 0),
}


def findings(costs: Mapping[str, Costs]) -> list[str]:
    """Return a line for each file that has cost more than its budget; files are named below `tests/`.

    The lines are a report and never an exit status: seconds differ between machines and with what else runs there.
    """
    lines = []
    small = Costs()
    for name, spent in sorted(costs.items()):
        if name not in BUDGETS:
            small.add(spent.quick, False)
            small.add(spent.thorough, True)
        lines += _above(f"tests/{name}", spent, BUDGETS.get(name, (SMALL_SECONDS, SMALL_SECONDS)))
    return lines + _above("all files without a line", small, REST)


def _above(name: str, spent: Costs, budget: tuple[float, float]) -> list[str]:
    return [
        f"{name}: {seconds:.1f} of {most:g} in {kind}"
        for kind, seconds, most in (
            ("make test", spent.quick, budget[0]),
            ("make test-thorough", spent.thorough, budget[1]),
        )
        if seconds > most
    ]
