"""Tests that a GPU is given first, on the strict device: what they ask of a device, this one has to pass."""

from tests.gpu.conftest import device, make_streams, uncompiled  # noqa: F401 - fixtures
from tests.gpu.test_loops import (  # noqa: F401
    test_a_checkpoint_goes_on_in_another_placement,
    test_a_model_that_nothing_trains_computes_the_same,
    test_torchs_clipping_is_the_optimizers,
)
from tests.gpu.test_modes import (  # noqa: F401
    test_activations_off_the_device_change_nothing,
    test_states_go_and_come_back,
)
from tests.gpu.test_movement import (  # noqa: F401
    test_the_host_waits_for_nothing_inside_forward_and_backward,
    test_the_watch_sees_every_thread_and_only_waits_that_wait,
)
from tests.gpu.test_own_stream import (  # noqa: F401
    test_a_save_beside_training_holds_the_state_of_its_step,
    test_the_users_own_stream_trains_the_same,
)
from tests.gpu.test_pinned import (  # noqa: F401
    test_a_save_of_device_state_passes_pinned_memory,
    test_what_is_not_pinned_trains_the_same,
)
from tests.gpu.test_several_devices import test_everything_lands_on_the_device_that_was_current_in_prepare  # noqa: F401
