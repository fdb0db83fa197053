"""Where training state lives, and when it moves."""

# ruff: noqa: RUF009 (`option` makes a field, not a default that all settings would share)

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, cast

from penstock import Options, Placement
from penstock.cli.naming import naming_options
from penstock.cli.options import option, option_of
from penstock.cli.parse import parse_home, parse_share, parse_size_bytes
from penstock.cli.training.settings.common import AUTO, MOST_RANKS, MOST_THREADS, OFF, check_paths
from penstock.errors import ConfigError

_STATE = "Where state lives (tiers: device, cpu, nvme) and when it moves"
OVERLAPS = ("none", "forward", "backward", "auto")
#: What a plan says, and nobody beside one.
HOMES = ("params", "grads", "optimizer", "activations")

Home = str | dict[str, float]

# The home of a kind of state.
_home = partial(option, panel=_STATE, parse=parse_home, rivals=("plan",))
# A number of bytes, whose limits are the library's.
_size = partial(option, panel=_STATE, parse=parse_size_bytes)


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """The arguments of `penstock.prepare` that say where state lives."""

    plan: str = option(
        "",
        "In place of homes: auto finds those whose step is shortest, or a file of penstock plan.",
        _STATE,
        rivals=HOMES,
    )
    dp_replicate: int = option(
        1, "Copies of the state, each shared by ranks with consecutive numbers.", _STATE, least=1, most=MOST_RANKS
    )
    cp: int = option(1, "Ranks that share each sequence (Ulysses).", _STATE, least=1, most=MOST_RANKS)
    stage: int = option(3, "ZeRO stage, 0 to 3.", _STATE)
    params: Home = _home("device", "Home of the parameters: a tier, or device=0.5,cpu=0.5.")
    grads: Home = _home("device", "Home of the gradients.")
    optimizer: Home = _home("cpu", "Home of the master weights and optimizer states.")
    activations: str = option(
        OFF,
        "Tier of what forward saves for backward.",
        _STATE,
        choices=(OFF, "device", "cpu", "nvme"),
        rivals=("plan",),
    )
    nvme_path: tuple[str, ...] = option((), "Folders of the nvme tier.", _STATE, many=True)
    overlap: str = option("auto", "When updates run: none, forward, backward, auto.", _STATE, choices=OVERLAPS)
    # Named as in `penstock.Options`, which checks them, and has a default for each that is left out.
    device_bytes: int | None = _size(None, "Memory of the device that training state may take, such as 20GiB.")
    tile_bytes: int | None = _size(None, "Grain of updates and movement, such as 4MiB.")
    live_bytes: int | None = _size(None, "Parameters gathered at once, at most.")
    prefetch_bytes: int | None = _size(None, "Parameters gathered ahead of use, at most.")
    persistent_bytes: int | None = _size(None, "Parameters up to this size stay gathered.")
    pinned_bytes: int | None = _size(None, "Host memory that may be pinned.")
    host_bytes: int | None = _size(None, "Memory of a host for its ranks; the default is what is available.")
    update_threads: int | None = option(None, "Threads of the update on the host.", _STATE, most=MOST_THREADS)
    streamed_updates: float | Literal["auto"] | None = option(
        None, "Share of the host's updates that the device does, or auto.", _STATE, parse=parse_share
    )
    state_dtype: str | None = option(
        None, "How the optimizer's states are stored: fp32, bf16, int8.", _STATE, choices=("fp32", "bf16", "int8")
    )
    gather_format: str | None = option(
        None, "What gathers of parameters carry: exact, int8, fp8.", _STATE, choices=("exact", "int8", "fp8")
    )
    reduce_format: str | None = option(
        None, "What sums of gradients carry: exact, int8, int4.", _STATE, choices=("exact", "int8", "int4")
    )
    secondary_shard: int | None = option(
        None, "Ranks of a node, inside which backward gathers what forward has gathered.", _STATE
    )
    timeout_s: float | None = option(
        None, "Seconds that a rank waits for the others before it ends, with an error.", _STATE
    )

    def check_state(self) -> None:
        """Refuse what can be told of these options by themselves.

        Raises:
            ConfigError: also what the library says of them, which names its own arguments like these options.
        """
        if not 0 <= self.stage <= 3:
            raise ConfigError(f"--stage {self.stage} is not a ZeRO stage. Use 0, 1, 2 or 3.")
        check_paths("--nvme-path", *self.nvme_path)
        check_paths("--plan", self.plan or AUTO)
        self._check_plan()
        with naming_options():
            self.options()
            homes = {name: self.placement().home(name) for name in ("params", "grads", "optimizer")}
        on_disk = [name for name, home in homes.items() if "nvme" in home]
        on_disk += ["activations"] if self.activations == "nvme" else []
        if on_disk and not self.nvme_path:
            raise ConfigError(
                f"{option_of(on_disk[0])} puts state on nvme, which needs a folder for its files. Name one on a fast "
                "disk with --nvme-path."
            )

    def _check_plan(self) -> None:
        """Refuse what a plan says, beside one."""
        if not self.plan:
            return
        defaults = {each.name: each.default for each in fields(StateOptions)}
        said = [name for name in HOMES if getattr(self, name) != defaults[name]]
        if said:
            raise ConfigError(
                f"--plan says where state lives, and so does {option_of(said[0])}. Leave one of them out."
            )

    @property
    def sizes(self) -> dict[str, Any]:
        """List the fields that `penstock.Options` has too, those that were given."""
        names = [field.name for field in fields(Options)]
        return {name: value for name in names if (value := getattr(self, name, None)) is not None}

    def options(self) -> Options:
        """Make the library's options. Raises `ConfigError` where one is out of range."""
        return Options(**self.sizes)

    def placement(self) -> Placement:
        """Make the library's placement. Raises `ConfigError` where there is no such tier."""
        params, grads, optimizer = (cast("Any", home) for home in (self.params, self.grads, self.optimizer))
        activations = None if self.activations == OFF else cast("Any", self.activations)
        return Placement(
            params=params,
            grads=grads,
            optimizer=optimizer,
            activations=activations,
            nvme_path=self.nvme_path or None,
        )
