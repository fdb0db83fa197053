"""Who runs in which case and what is found of them, as data: a contender is a function of `contenders.py`, by name."""

from dataclasses import dataclass, field
from typing import Any

#: The figures of a row, and what they are.
RATES = {
    "batch": "sequences of a step",
    "sequence": "tokens of each",
    "tokens_per_second": "of the steady step",
    "mfu": "model FLOPs utilisation of that step: `shapes.flops_per_token` over the device's peak",
    "steady_step_ms": "median of all steps but a round's first, from the beginning of one to that of the next: what a "
    "long run sees. That of the round where it has fewer than three steps",
    "step_ms": "of the median round, which ends when all is done: the whole of its last update is charged to its steps",
    "round_step_ms": "of each round",
    "phases_ms": "medians over the steps: forward, backward and step, from events of the device's stream",
    "host_ms": "the same phases by the host's clock: until each call returns",
    "device_peak_bytes": "allocated on the device, at most, in the counted steps",
    "device_reserved_bytes": "taken from the device by torch's allocator, at most, in the counted steps",
    "pinned_bytes": "page-locked host memory after the last counted step",
    "resident_bytes": "resident set of the process, at most, in the counted steps",
    "flops_per_token": "of the model",
    "trace": "penstock's own report of two more steps, of the first batch size",
    "profile": "torch's profiler over two more of them, a step: kernels, copies, their bytes and seconds",
    "pinned_copies": "bytes/s of a copy of pinned memory up, and down, in the same process, with nothing beside it",
    "link": "bytes/s of the step's copies up, and down, while they run, and as a share of `pinned_copies`",
    "arithmetic": "dtypes of masters and states, clipping, recomputation, attention, and how FLOPs are counted",
    "losses": "of every counted step: the same batches for every contender",
    "setup_seconds": "from the start of the process's work to the end of warm-up",
    "predicted": "the planner's step_ms, bound_by and peaks on the probed machine: `predict.py` fills it in later",
}
#: What `judge.py` says of a row beside others of the report.
JUDGED = {
    "losses_beside": "the contender whose losses these are held against: the first one that was measured under the cap",
    "losses_apart": "from those, at most, of any step",
    "differs": "by more than `LOSS_TOLERANCE`",
    "targets": "those that this row decides: what, measured, met",
}
#: How far apart two losses of the same step may be: contenders round their updates differently, and weights are bf16.
LOSS_TOLERANCE = 0.02


@dataclass(frozen=True)
class Contender:
    """One row of a report.

    Attributes:
        setup: a function of `contenders.py`.
        options: its arguments beside the model and the device.
        needs: a module without which it cannot run.
        note: what a reader of its numbers has to know.
        states: dtype of the moments.
    """

    setup: str
    options: dict[str, Any] = field(default_factory=dict)
    needs: str = "torch"
    note: str = ""
    states: str = "fp32"


@dataclass(frozen=True)
class Case:
    """What a case compares, and on how much work: `rounds` of `steps` steps are counted."""

    contenders: tuple[str, ...]
    shape: str = "qwen3-0.6b"
    data: str = "random"
    batch: int = 1
    sequence: int = 4096
    warmup: int = 3
    rounds: int = 3
    steps: int = 8


TWIN_FLOW = (0.0, 0.25, 0.5, 0.75, 1.0)
STREAMED = (0.2, 0.4, 0.6, 0.8, 1.0)
CASES = {
    "step": Case(  # in the order in which they tell most: a run may be cut off
        (
            "plain",
            "penstock-device",
            "penstock-optimizer-cpu",
            "penstock-all-cpu",
            "penstock-all-cpu-14-threads",
            "penstock-optimizer-cpu-streamed",
            "penstock-all-cpu-streamed",
            "deepspeed-zero-offload",
            "deepspeed-zero3-offload",
            "deepspeed-superoffload",
            "fsdp2-offload",
            "torchao-offload",
            "penstock-twin-flow-0.5",
            "penstock-optimizer-nvme",
            "deepspeed-zero-infinity",
            "penstock-auto",
        ),
        batch=4,  # 16k tokens: what the targets speak of
    ),
    "twin-flow": Case(tuple(f"penstock-twin-flow-{ratio:g}" for ratio in TWIN_FLOW)),
    "streamed": Case(
        (
            "penstock-optimizer-cpu",
            *(f"penstock-optimizer-cpu-streamed-{share:g}" for share in STREAMED),
            "penstock-optimizer-cpu-streamed",
        )
    ),
    "nvme": Case(("penstock-optimizer-nvme", "penstock-optimizer-nvme-int8", "deepspeed-zero-infinity")),
    "curves": Case(
        ("plain", "penstock-device", "penstock-optimizer-cpu", "penstock-all-cpu", "penstock-twin-flow-0.5"),
        shape="125m",
        data="text",
        batch=8,
        sequence=512,
        warmup=0,
        rounds=1,
        steps=300,
    ),
}
#: Cases that are benchmarks of their own, each with contenders that take turns in one process.
SCRIPTS = {"states": "residency.py", "checkpoint": "checkpoint.py"}


def contenders(*, batch: int, sequence: int, folder: str, max_grad_norm: float | None) -> dict[str, Contender]:
    """All contenders by name; files of the nvme tier go to `folder`."""
    clip = {"max_grad_norm": max_grad_norm}

    def penstock(needs: str = "torch", options: dict[str, Any] | None = None, **placement: Any) -> Contender:
        given: Any = placement or "auto"
        planned = {} if placement else {"planned": (batch, sequence)}
        arguments = {"placement": given, "overlap": "forward", "options": options or {}, **planned, **clip}
        return Contender("penstock", arguments, needs, states=(options or {}).get("state_dtype", "fp32"))

    def deepspeed(stage: int, optimizer: str, params: str | None, note: str = "", **more: Any) -> Contender:
        options = {"batch": batch, "stage": stage, "optimizer": optimizer, "params": params, "folder": folder}
        return Contender("deepspeed", options | more | clip, "deepspeed", note)

    on_cpu = dict(params="device", grads="cpu", optimizer="cpu")
    all_on_cpu = dict(params="cpu", grads="cpu", optimizer="cpu")
    streamed = {"streamed_updates": "auto"}
    int8 = {"state_dtype": "int8"}
    nvme = dict(params="device", grads="cpu", optimizer="nvme", nvme_path=folder)
    found = {
        "plain": Contender("plain", clip),
        "forward-backward": Contender("bare", note="trains nothing: the least that a step takes", states="none"),
        "penstock-device": penstock(params="device", grads="device", optimizer="device"),
        "penstock-optimizer-only-cpu": penstock(params="device", grads="device", optimizer="cpu"),
        "penstock-optimizer-cpu": penstock(**on_cpu),
        "penstock-optimizer-cpu-streamed": penstock(options=streamed, **on_cpu),
        "penstock-all-cpu": penstock(**all_on_cpu),
        # Of 16 cores two are left to the threads that feed the device: forward's, and that of autograd or of copies.
        "penstock-all-cpu-14-threads": penstock(options={"update_threads": 14}, **all_on_cpu),
        "penstock-all-cpu-int8": penstock(options=int8, **all_on_cpu),
        "penstock-all-cpu-activations": penstock(**all_on_cpu, activations="cpu"),
        "penstock-all-cpu-streamed": penstock(options=streamed, **all_on_cpu),
        "penstock-optimizer-nvme": penstock(**nvme),
        "penstock-optimizer-nvme-int8": penstock(options=int8, **nvme),
        "penstock-auto": penstock(needs="penstock.planner"),
        "penstock-first-fit": Contender(
            "penstock",
            {"placement": "first fit", "overlap": "forward", "planned": (batch, sequence), "folder": folder, **clip},
            "penstock.planner",
        ),
        "deepspeed-zero-offload": deepspeed(2, "cpu", None),
        "deepspeed-zero3-offload": deepspeed(3, "cpu", "cpu"),
        "deepspeed-superoffload": deepspeed(
            3, "cpu", None, "the memory of its own process on the host is not counted", super_offload=True
        ),
        "deepspeed-zero-infinity": deepspeed(3, "nvme", "cpu"),
        "fsdp2-offload": Contender("fsdp2", clip),
        "torchao-offload": Contender("torchao", {}, "torchao", "does not clip; fp32 weights, cast for each use"),
    }
    for ratio in TWIN_FLOW:  # a gradient is where its optimizer state is, so that its update moves nothing
        split = {"cpu": ratio, "device": 1 - ratio}
        found[f"penstock-twin-flow-{ratio:g}"] = penstock(params="device", grads=split, optimizer=split)
    for share in STREAMED:
        found[f"penstock-optimizer-cpu-streamed-{share:g}"] = penstock(options={"streamed_updates": share}, **on_cpu)
    return found
