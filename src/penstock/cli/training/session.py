"""A run among its ranks: the model prepared, trained, saved."""

import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import penstock
from penstock.cli.training.data.dataset import Data
from penstock.cli.training.data.feed import DataFeed
from penstock.cli.training.interruption import Interruption, asked_to_end
from penstock.cli.training.learning.best import BestCheckpoint
from penstock.cli.training.learning.checkpoints import Checkpoints, Position, best_of, checkpoint_to_resume
from penstock.cli.training.learning.evaluation import Evaluations
from penstock.cli.training.learning.loop import Ending, LoopStepper, Training, Why
from penstock.cli.training.learning.optimizer import Preparation
from penstock.cli.training.learning.sharing import loss_of, mesh_of
from penstock.cli.training.planning import PLAN_NAME, write_plan
from penstock.cli.training.recipe import Course
from penstock.cli.training.reporting.formats import format_seconds
from penstock.cli.training.reporting.gauges import Gauges
from penstock.cli.training.reporting.reports import Reports
from penstock.cli.training.request import Request
from penstock.cli.training.runfile import write_run_file
from penstock.cli.training.sampling import Sampler, prompts_of
from penstock.cli.training.saving import save_model
from penstock.files import check_own


class Session:
    """What ranks do together, from the prepared model on. Every rank has one, and makes every call.

    Arguments:
        request: what is asked for.
        data: what is trained on.
        course: what a step is, and how many there are.
        prepared: how the model is trained.
        reports: who is told.
        interruption: what may ask the run to end.
    """

    def __init__(
        self,
        request: Request,
        data: Data,
        course: Course,
        prepared: Preparation,
        reports: Reports,
        interruption: Interruption,
    ) -> None:
        self._request = request
        self._data = data
        self._course = course
        self._model = prepared.model
        self._plan = prepared.plan
        self._reports = reports
        self._interruption = interruption
        self._began = time.perf_counter()
        self._about = _about(request, data, prepared)  # before it is sharded, which changes its parameters
        mesh = mesh_of(request.ranks)
        self._loss = loss_of(prepared.model, mesh, chunks_loss=request.chunks_loss)
        self._optimizer = prepared.prepare(mesh)
        self._feed = DataFeed(data, request.config, course, request.ranks, pad_id=request.pad_id)
        self._checkpoints = Checkpoints(request.config, course, self._optimizer, self._feed.identity())
        self._best = BestCheckpoint(best_of(request.config), self._optimizer, request.ranks, reports)

    def run(self, resolved: Mapping[str, Any], plan: Mapping[str, int]) -> bool:
        """Train, and save what comes out.

        1. Go on from a checkpoint if asked.
        2. Train, and measure the held-out loss. A run that is asked to end ends here.
        3. Go back to the lowest held-out loss if asked, and save the model.
        4. Write samples: what goes wrong there takes nothing of the model away.

        Arguments:
            resolved: what was left to the run and is known now, by the names of options.
            plan: the bytes of training state, by tier.

        Returns:
            Whether it came to its end.
        """
        config, ranks = self._request.config, self._request.ranks
        # 1.
        start = self._begin()
        if ranks.is_first:
            if self._plan is not None:
                # So that the run is made again with this plan, whatever becomes of the file that it was read from.
                write_plan(self._plan, check_own(config.out / PLAN_NAME))
                config = replace(config, plan=str(config.out / PLAN_NAME))
            write_run_file(config, resolved, world_size=ranks.world_size, plan=plan)
        # 2.
        sampler = self._sampler()
        ending = self._train(start, sampler)
        if ending.why is Why.ASKED:
            self._reports.note(asked_to_end(step=ending.position.step))
            self._optimizer.close(keep_params=False)
            return False
        # 3.
        best = self._checkpoints.best
        is_best = config.keeps_best and self._best.go_back(best, ending.position.step)
        save_model(self._model, self._optimizer, self._request)
        self._reports.note(f"saved the model in {config.out}")
        # 4.
        if not ranks.any(self._interruption.asked):
            sampler.write(best.step if is_best else ending.position.step)
        self._end(ending, best.loss if is_best else ending.loss_after)
        return True

    def _begin(self) -> Position:
        """Go on from a checkpoint, or begin; from here on signals are noted, and an earlier run's files may go."""
        resumed = checkpoint_to_resume(self._request.config)
        start = self._checkpoints.resume(resumed)
        if start.step:
            differing = f", with {self._checkpoints.changed}" if self._checkpoints.changed else ""
            self._reports.note(f"goes on after step {start.step}{differing}")
        if self._request.config.keeps_best:
            self._best.look(self._checkpoints.best)
        # Nothing can be refused any more.
        self._interruption.defer()
        begin = {"begin": start.step} if resumed is not None else {}
        self._reports.start(goes_on=resumed is not None, **self._about, **begin)
        return start

    def _sampler(self) -> Sampler:
        request = self._request
        prompts = prompts_of(request.config, self._data, request.tokenizer)
        return Sampler(
            self._model,
            self._optimizer,
            prompts,
            request.tokenizer,
            request.config,
            self._course,
            request.ranks,
            self._reports,
        )

    def _train(self, start: Position, sampler: Sampler) -> Ending:
        config, ranks = self._request.config, self._request.ranks
        evaluations = None
        if config.eval_sequences:
            evaluations = Evaluations(
                self._model,
                self._loss,
                self._feed,
                ranks,
                self._reports,
                self._interruption,
                token_name=self._request.tokenizer.token_name,
                # Of the prompts that were named: what is held out is continued at the end alone.
                sampler=sampler if config.prompt else None,
            )
        training = Training(
            LoopStepper(self._loss, self._optimizer, self._course, ranks),
            self._feed,
            self._checkpoints,
            evaluations,
            config,
            self._reports,
            Gauges(self._model, self._optimizer, config, self._course, ranks, begin=start.step),
            self._interruption,
        )
        return training.run(start)

    def _end(self, ending: Ending, loss_after: float | None) -> None:
        """Give everything back, and tell what came out."""
        self._optimizer.close(keep_params=False)
        seconds = time.perf_counter() - self._began
        out = str(self._request.config.out)
        self._reports.end(model=out, loss_before=ending.loss_before, loss_after=loss_after, seconds=seconds)
        self._reports.note(f"done in {format_seconds(seconds)}")


def _about(request: Request, data: Data, prepared: Preparation) -> dict[str, object]:
    """List what `metrics.jsonl` says of a run at its start."""
    parameters = list(prepared.model.parameters())
    return {
        "config": request.config.to_dict(),
        "world_size": request.ranks.world_size,
        "device": str(request.ranks.device),
        "precision": request.precision,
        "parameter_count": sum(p.numel() for p in parameters),
        "trained_count": sum(p.numel() for p in parameters if p.requires_grad),
        "data": data.about(),
        "versions": {"penstock": penstock.__version__} | {name: version(name) for name in ("torch", "transformers")},
    }
