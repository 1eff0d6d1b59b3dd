"""A padded batch of trl's distillation trainer as rollouts."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from prime_composer.backends.protocols import Rollout

SCORES = "prime_composer_scores"  # Key of the teacher's, one ``Scores`` per row, in the batch


def rollouts_of(batch: Mapping[str, Any], eos_token_ids: Collection[int]) -> list[Rollout]:
    """Return the sequences of a batch without their padding, one per row.

    Tokens of the completion train, except for those that a tool wrote. Padding is told by the
    masks, because many tokenizers pad with EOS. trl keeps no log mu: it is NaN. ``batch`` has
    ``prompt_ids`` (padded on the left), ``completion_ids`` (on the right) and their masks, [rows,
    tokens].
    """
    prompts, completions = batch["prompt_ids"].cpu(), batch["completion_ids"].cpu()
    prompt_masks, completion_masks = (
        batch[name].cpu().bool() for name in ("prompt_mask", "completion_mask")
    )
    trained = completion_masks
    if batch.get("tool_mask") is not None:
        trained = completion_masks & batch["tool_mask"].cpu().bool()
    rollouts = []
    for row, prompt_mask in enumerate(prompt_masks):
        completion_mask = completion_masks[row]
        prompt = prompts[row][prompt_mask]
        token_ids = torch.cat([prompt, completions[row][completion_mask]])
        loss_mask = torch.cat(
            [torch.zeros_like(prompt, dtype=torch.bool), trained[row][completion_mask]]
        )
        rollouts.append(
            Rollout(
                token_ids=token_ids,
                loss_mask=loss_mask,
                inference_logprobs=torch.full(token_ids.shape, torch.nan),
                finish_reason="stop" if int(token_ids[-1]) in eos_token_ids else "length",
                prompt_index=row,
            )
        )
    return rollouts
