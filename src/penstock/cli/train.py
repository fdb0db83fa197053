"""`penstock train`: the options of the command as a `TrainConfig`. The run itself is `penstock.cli.training.run`."""

from importlib.util import find_spec
from typing import Annotated, Any

import typer

from penstock.cli.parse import parse_betas, parse_home, parse_path, parse_share, parse_size_bytes
from penstock.cli.training.config import TrainConfig, option_of
from penstock.errors import ConfigError

_DEFAULT = TrainConfig()
_DEFAULT_BETAS = ",".join(f"{beta:g}" for beta in _DEFAULT.betas)
_STATE = "Where state lives (tiers: device, cpu, nvme) and when it moves"
_LEARNING = "Learning"
_REPORTS = "Measures, reports and checkpoints"


def train(
    model: Annotated[
        str, typer.Option(help="A model folder, or random weights of a preset: tiny, small, medium.")
    ] = _DEFAULT.model,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run the model folder's own code, which can do anything you can."),
    ] = _DEFAULT.trust_remote_code,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A file, a folder or a glob of .txt .py .md .jsonl. Repeatable.", show_default="Python's own library"
        ),
    ] = None,
    jsonl_field: Annotated[str, typer.Option(help="The field of a .jsonl line with the text.")] = _DEFAULT.jsonl_field,
    out: Annotated[str, typer.Option(help="Folder for the trained model and metrics.jsonl.")] = str(_DEFAULT.out),
    seed: Annotated[int, typer.Option(help="Of weights, data order, dropout and sample.")] = _DEFAULT.seed,
    stage: Annotated[int, typer.Option(help="ZeRO stage, 0 to 3.", rich_help_panel=_STATE)] = _DEFAULT.stage,
    params: Annotated[
        str,
        typer.Option(help="Home of the parameters: a tier, or device=0.5,cpu=0.5.", rich_help_panel=_STATE),
    ] = "device",
    grads: Annotated[str, typer.Option(help="Home of the gradients.", rich_help_panel=_STATE)] = "device",
    optimizer: Annotated[
        str, typer.Option(help="Home of the master weights and optimizer states.", rich_help_panel=_STATE)
    ] = "cpu",
    nvme_path: Annotated[
        list[str] | None, typer.Option(help="A folder of the nvme tier. Repeatable.", rich_help_panel=_STATE)
    ] = None,
    precision: Annotated[
        str,
        typer.Option(help="fp32, bf16, or auto: bf16 where the hardware computes in it.", rich_help_panel=_STATE),
    ] = _DEFAULT.precision,
    overlap: Annotated[
        str, typer.Option(help="When updates run: none, forward, backward, auto.", rich_help_panel=_STATE)
    ] = _DEFAULT.overlap,
    activation_checkpointing: Annotated[
        bool,
        typer.Option("--activation-checkpointing", help="Recompute activations in backward.", rich_help_panel=_STATE),
    ] = _DEFAULT.activation_checkpointing,
    chunked_loss: Annotated[
        bool,
        typer.Option(
            "--chunked-loss",
            help="Train without whole logits, which take most of the memory of long sequences.",
            rich_help_panel=_STATE,
        ),
    ] = _DEFAULT.chunked_loss,
    tile_bytes: Annotated[
        str | None, typer.Option(help="Grain of updates and movement, such as 4MiB.", rich_help_panel=_STATE)
    ] = None,
    live_bytes: Annotated[
        str | None, typer.Option(help="Parameters gathered at once, at most.", rich_help_panel=_STATE)
    ] = None,
    prefetch_bytes: Annotated[
        str | None, typer.Option(help="Parameters gathered ahead of use, at most.", rich_help_panel=_STATE)
    ] = None,
    persistent_bytes: Annotated[
        str | None, typer.Option(help="Parameters up to this size stay gathered.", rich_help_panel=_STATE)
    ] = None,
    pinned_bytes: Annotated[
        str | None, typer.Option(help="Host memory that may be pinned.", rich_help_panel=_STATE)
    ] = None,
    update_threads: Annotated[
        int | None, typer.Option(help="Threads of the update on the host.", rich_help_panel=_STATE)
    ] = None,
    streamed_updates: Annotated[
        str | None,
        typer.Option(help="Share of the host's updates that the device does, or auto.", rich_help_panel=_STATE),
    ] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", rich_help_panel=_LEARNING)] = _DEFAULT.lr,
    weight_decay: Annotated[
        float, typer.Option(help="Of parameters with two or more dimensions.", rich_help_panel=_LEARNING)
    ] = _DEFAULT.weight_decay,
    betas: Annotated[
        str, typer.Option(help="Decay rates of AdamW's two moments.", rich_help_panel=_LEARNING)
    ] = _DEFAULT_BETAS,
    max_grad_norm: Annotated[
        float, typer.Option(help="Clip the gradient's norm to this; 0 does not clip.", rich_help_panel=_LEARNING)
    ] = _DEFAULT.max_grad_norm or 0.0,
    warmup: Annotated[
        int | None,
        typer.Option(
            help="Steps of growing learning rate.", rich_help_panel=_LEARNING, show_default="a tenth of the steps"
        ),
    ] = _DEFAULT.warmup,
    steps: Annotated[int, typer.Option(help="Optimizer steps.", rich_help_panel=_LEARNING)] = _DEFAULT.steps,
    batch_size: Annotated[
        int, typer.Option(help="Sequences per rank and micro-batch.", rich_help_panel=_LEARNING)
    ] = _DEFAULT.batch_size,
    accumulation: Annotated[
        int, typer.Option(help="Micro-batches per step.", rich_help_panel=_LEARNING)
    ] = _DEFAULT.accumulation,
    seq_length: Annotated[
        int, typer.Option(help="Tokens per sequence.", rich_help_panel=_LEARNING)
    ] = _DEFAULT.seq_length,
    eval_sequences: Annotated[
        int, typer.Option(help="Held-out sequences in all; 0 measures nothing.", rich_help_panel=_REPORTS)
    ] = _DEFAULT.eval_sequences,
    sample_tokens: Annotated[
        int, typer.Option(help="Tokens of the sample at the end; 0 writes none.", rich_help_panel=_REPORTS)
    ] = _DEFAULT.sample_tokens,
    prompt: Annotated[
        str, typer.Option(help="What the sample continues.", show_default="held-out text", rich_help_panel=_REPORTS)
    ] = _DEFAULT.prompt,
    log_every: Annotated[
        int, typer.Option(help="Steps between two reports.", rich_help_panel=_REPORTS)
    ] = _DEFAULT.log_every,
    save_every: Annotated[
        int,
        typer.Option(help="Steps between checkpoints, saved beside training; 0 for none.", rich_help_panel=_REPORTS),
    ] = _DEFAULT.save_every,
    keep: Annotated[int, typer.Option(help="Checkpoints that stay.", rich_help_panel=_REPORTS)] = _DEFAULT.keep,
    resume: Annotated[
        str,
        typer.Option(
            help="auto: go on from the newest checkpoint in the out folder, if any. Or a checkpoint's folder.",
            rich_help_panel=_REPORTS,
        ),
    ] = _DEFAULT.resume,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Write TensorBoard events into the out folder.", rich_help_panel=_REPORTS),
    ] = _DEFAULT.tensorboard,
) -> None:
    """Train a causal language model on text, and save it for from_pretrained.

    Without options: a small byte-level model on the text of Python's own standard library, with the optimizer's state
    in host memory. With several processes: torchrun --nproc-per-node 2 -m penstock train ...

    SIGTERM and SIGUSR1 end it after the step that is being made, with a checkpoint and exit status 75; --resume auto
    goes on from there, on any number of processes.
    """
    sizes = {
        "tile_bytes": tile_bytes,
        "live_bytes": live_bytes,
        "prefetch_bytes": prefetch_bytes,
        "persistent_bytes": persistent_bytes,
        "pinned_bytes": pinned_bytes,
    }
    options: dict[str, Any] = {
        name: parse_size_bytes(text, option=option_of(name)) for name, text in sizes.items() if text is not None
    }
    if update_threads is not None:
        options["update_threads"] = update_threads
    if streamed_updates is not None:
        options["streamed_updates"] = parse_share(streamed_updates, option="--streamed-updates")
    config = TrainConfig(
        model=model,
        trust_remote_code=trust_remote_code,
        data=tuple(data or ()),
        jsonl_field=jsonl_field,
        out=parse_path(out, option="--out"),
        seed=seed,
        stage=stage,
        params=parse_home(params, option="--params"),
        grads=parse_home(grads, option="--grads"),
        optimizer=parse_home(optimizer, option="--optimizer"),
        nvme_path=tuple(nvme_path or ()),
        precision=precision,
        overlap=overlap,
        activation_checkpointing=activation_checkpointing,
        chunked_loss=chunked_loss,
        options=tuple(options.items()),
        lr=lr,
        weight_decay=weight_decay,
        betas=parse_betas(betas, option="--betas"),
        max_grad_norm=max_grad_norm or None,
        warmup=warmup,
        steps=steps,
        batch_size=batch_size,
        accumulation=accumulation,
        seq_length=seq_length,
        eval_sequences=eval_sequences,
        sample_tokens=sample_tokens,
        prompt=prompt,
        log_every=log_every,
        save_every=save_every,
        keep=keep,
        resume=resume,
        tensorboard=tensorboard,
    )
    if find_spec("transformers") is None:
        raise ConfigError("penstock train needs transformers. Install it with: pip install 'penstock[train]'")
    from penstock.cli.training.interruption import EXIT_INTERRUPTED
    from penstock.cli.training.run import run  # imports transformers, which --help does not wait for

    if run(config).interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
