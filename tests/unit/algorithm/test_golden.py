"""Three responses of 4, 3 and 2 tokens with known losses and gradients, computed by TRL 1.16 in fp32.

`expected` rows: loss, norm of d loss / d logprobs, and three of its entries (response 0 token 0, 1/1, 2/0). Settings:
clip 0.2 / 0.28 (cispo: weights up to 1.1), kl_coef 0.04 with the importance weight, max_response_length 8.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.algorithm.aggregation import token_weights
from covey.algorithm.correction import high_entropy_tokens
from covey.algorithm.losses import LOSSES, LossOptions
from covey.algorithm.objective import Objective, Tokens, token_objective

LENGTHS = [4, 3, 2]
MAX_RESPONSE_LENGTH = 8
RESPONSE_INDEX = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
PICKED = [0, 5, 7]  # response 0 token 0, response 1 token 1, response 2 token 0
ADVANTAGES = torch.tensor([1.0, -0.5, -1.5])[RESPONSE_INDEX]

OLD = torch.tensor([-1.2, -0.5, -1.5, -0.6, -0.9, -1.0, -0.25, -2.0, -0.4])
REF = torch.tensor([-1.1, -0.7, -1.8, -0.5, -0.6, -1.4, -0.3, -2.4, -0.3])
SAMPLED = torch.tensor([-1.1, -0.6, -1.5, -0.5, -1.0, -1.1, -0.2, -2.2, -0.4])
ENTROPY = torch.tensor([0.5, 1.0, 2.0, 0.1, 0.7, 1.5, 0.3, 2.5, 0.2])

# (loss, sequence_ratio, aggregation): expected
LOSS_CASES = {
    ("grpo", False, "sequence_mean"): (0.3599246, 0.3767281, -0.1013764, -0.0002696, -0.0004044),
    ("grpo", True, "sequence_mean"): (0.2678798, 0.3707878, -0.0829630, 0.0490633, 0.2256470),
    ("grpo", False, "constant"): (0.0250002, 0.1145485, -0.0506882, -0.0001011, -0.0001011),
    ("grpo", True, "constant"): (0.0022444, 0.1197368, -0.0414815, 0.0183988, 0.0564118),
    ("grpo", False, "token_mean"): (0.0666671, 0.3054626, -0.1351686, -0.0002696, -0.0002696),
    ("grpo", True, "token_mean"): (0.0059851, 0.3192980, -0.1106174, 0.0490633, 0.1504313),
    ("grpo", False, "sequence_sum"): (0.2000013, 0.9163878, -0.4055057, -0.0008087, -0.0008087),
    ("grpo", True, "sequence_sum"): (0.0179555, 0.9578941, -0.3318522, 0.1471900, 0.4512940),
    ("gspo", False, "sequence_mean"): (0.2678798, 0.3707878, -0.0829630, 0.0490633, 0.2256470),
    ("cispo", False, "token_mean"): (-0.0323917, 0.3140565, -0.1216794, 0.0334266, 0.1008189),
    ("cispo", True, "token_mean"): (-0.0929652, 0.3192980, -0.1106174, 0.0490633, 0.1504313),
    ("sapo", False, "sequence_mean"): (0.5654851, 0.4095952, -0.1001392, 0.0320286, 0.1449376),
    ("sapo", True, "sequence_mean"): (0.5377811, 0.3700338, -0.0829630, 0.0488985, 0.2250834),
    ("vespo", False, "token_mean"): (-0.0067017, 0.2955659, -0.1105683, 0.0348236, 0.1311683),
}

# variations of grpo with token ratios and token_mean: expected
OPTION_CASES = {
    "no kl": (0.0661195, 0.3051232, -0.1357114, 0.0, 0.0),
    "kl without importance weight": (0.0666485, 0.3053437, -0.1352885, -0.0004674, -0.0004674),
    "dual clip 1.1": (0.0885131, 0.1545408, 0.0005428, -0.0002696, -0.0002696),
    "off-policy mask 0.05": (-0.0975797, 0.2935859, -0.1351686, -0.0002696, -0.0002696),
    "top half of the entropies": (0.0612203, 0.1428889, 0.0005428, -0.0002696, -0.0002696),
    "entropy bonus 0.1": (-0.0311107, 0.3054626, -0.1351686, -0.0002696, -0.0002696),
    "sequence mask 1.2": (-0.2216262, 0.1956549, -0.1222539, -0.0002696, -0.0002696),
    "token truncate 1.1": (0.1030742, 0.3049722, -0.1222539, -0.0002696, -0.0002696),
}
CLIP = LossOptions(clip_low=0.2, clip_high=0.28)
GRPO = Objective(loss=LOSSES["grpo"], options=CLIP, kl_coef=0.04, kl_importance_weighted=True)


@pytest.mark.parametrize(("case", "expected"), LOSS_CASES.items())
def test_loss_and_gradient_equal_trl(case: tuple[str, bool, str], expected: tuple[float, ...]) -> None:
    loss, sequence_ratio, aggregation = case
    low, high = (1.0, 0.1) if loss == "cispo" else (0.2, 0.28)
    options = LossOptions(clip_low=low, clip_high=high, sequence_ratio=sequence_ratio)
    check(replace(GRPO, loss=LOSSES[loss], options=options), aggregation, expected)


@pytest.mark.parametrize(
    ("case", "objective"),
    [
        ("no kl", replace(GRPO, kl_coef=0.0)),
        ("kl without importance weight", replace(GRPO, kl_importance_weighted=False)),
        ("dual clip 1.1", replace(GRPO, options=replace(CLIP, dual_clip=1.1))),
        ("off-policy mask 0.05", replace(GRPO, off_policy_max_kl=0.05)),
        ("entropy bonus 0.1", replace(GRPO, entropy_coef=0.1)),
        ("sequence mask 1.2", replace(GRPO, rollout_correction="sequence_mask", rollout_ratio_high=1.2)),
        ("token truncate 1.1", replace(GRPO, rollout_correction="token_truncate", rollout_ratio_high=1.1)),
    ],
)
def test_options_equal_trl(case: str, objective: Objective) -> None:
    check(objective, "token_mean", OPTION_CASES[case])


def test_top_entropy_tokens_equal_trl() -> None:
    keep = high_entropy_tokens(ENTROPY, share=0.5)
    check(GRPO, "token_mean", OPTION_CASES["top half of the entropies"], keep=keep)


def check(objective: Objective, aggregation: str, expected: tuple[float, ...], *, keep: Tensor | None = None) -> None:
    per_response = token_weights(
        np.array(LENGTHS),
        np.ones(3, dtype=bool),
        aggregation,
        num_responses=3,
        max_response_length=MAX_RESPONSE_LENGTH,
    )
    logprobs = torch.tensor([-1.0, -0.5, -2.0, -0.3, -0.8, -1.5, -0.2, -2.5, -0.1], requires_grad=True)
    tokens = Tokens(
        logprobs=logprobs,
        entropy=ENTROPY,
        old_logprobs=OLD,
        rollout_logprobs=SAMPLED,
        ref_logprobs=REF,
        advantages=ADVANTAGES,
        response_index=RESPONSE_INDEX,
        num_responses=3,
        keep=keep,
    )
    weights = torch.tensor(per_response, dtype=torch.float32)[RESPONSE_INDEX]
    total = (token_objective(tokens, objective).total * weights).sum()
    total.backward()
    gradient = logprobs.grad
    assert gradient is not None
    got = [total.item(), gradient.norm().item(), *(gradient[i].item() for i in PICKED)]
    assert got == pytest.approx(list(expected), abs=1e-6)
