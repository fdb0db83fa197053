"""Samples of a run: what its model writes after prompts, or after the beginning of what is held out."""

from torch import nn

import penstock
from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data.dataset import Data
from penstock.cli.training.recipe import Recipe
from penstock.cli.training.reporting.reports import Reports
from penstock.cli.training.reporting.samples import (
    Prompt,
    Sampling,
    chat_prompts,
    stop_ids_of,
    text_prompts,
    write_samples,
)
from penstock.integrations.tokenizers import Tokenizer


def prompts_of(config: TrainConfig, data: Data, tokenizer: Tokenizer) -> list[Prompt]:
    """Make the prompts of a run. Of one that trains on conversations they are what a user says."""
    if not config.prompt:
        ids = data.prompt()
        return [Prompt(tokenizer.decode(ids), tuple(ids))]
    if not data.is_chat:
        return text_prompts(config.prompt, tokenizer.encode)
    template = tokenizer.chat()

    def render(messages: list[dict[str, str]]) -> list[int]:
        text = template.render(tuple(messages), None, {}, begins_turn=True)
        return [int(i) for i in tokenizer.encode_located([text])[0].ids]

    return chat_prompts(config.prompt, render)


class Sampler:
    """Lets a model continue the prompts of a run, and tells what it writes. Every rank makes every call.

    Arguments:
        model: what is trained.
        optimizer: of that model.
        prompts: what is continued.
        tokenizer: what makes text of ids.
        config: the settings, of which `seed` fixes what is drawn.
        recipe: what a step is.
        ranks: the place of this process.
        reports: who is told.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: penstock.Optimizer,
        prompts: list[Prompt],
        tokenizer: Tokenizer,
        config: TrainConfig,
        recipe: Recipe,
        ranks: Ranks,
        reports: Reports,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._prompts = prompts
        self._decode = tokenizer.decode
        self._ranks = ranks
        self._reports = reports
        self._written_step: int | None = None
        self._sampling = Sampling(
            token_count=config.sample_tokens,
            seq_length=recipe.seq_length,
            seed=config.seed,
            stop_ids=stop_ids_of(model, tokenizer.end_of_document),
        )

    def write(self, step: int) -> None:
        """Write samples of the model as it is after some steps; of the one that it wrote last it writes no more."""
        if step == self._written_step:
            return
        self._written_step = step
        samples = write_samples(self._model, self._optimizer, self._prompts, self._decode, self._sampling, self._ranks)
        self._reports.samples(step, samples)
