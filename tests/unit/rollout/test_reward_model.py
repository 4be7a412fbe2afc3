"""The sequence-classification reward, against Hugging Face one text at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification, Qwen2Tokenizer

from covey.config.schema import RewardConfig
from covey.rewards.runner import Scorer
from covey.rollout.reward_model import RewardModel, batches, local_rewards
from covey.types import Group, Prompt, Response

CPU, F32 = torch.device("cpu"), torch.float32
LETTERS = ["<|endoftext|>", "Ġ", *"abcdefghijklmnopqrstuvwxyz"]  # Ġ: how byte-level tokenizers write a space


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("reward_model"))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(LETTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
    )
    config.num_labels = 2
    Qwen2ForSequenceClassification(config).save_pretrained(directory)
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    Qwen2Tokenizer(vocab=vocabulary, merges=[]).save_pretrained(directory)
    return directory


def by_hand(path: str, text: str, label: int) -> float:
    model = Qwen2ForSequenceClassification.from_pretrained(path).eval()
    ids = torch.tensor([[LETTERS.index(letter.replace(" ", "Ġ")) for letter in text]])
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, label])


TEXTS = [" is four", " is five no no no", " yes", " four four"]
ROWS = [{"prompt": "two plus two"}, {"prompt": "two"}, {"prompt": "no no no no"}, {"prompt": "two plus"}]


@pytest.mark.parametrize("max_tokens", [1, 50, 10_000])
def test_scores_equal_those_of_single_texts(path: str, max_tokens: int) -> None:
    options = {"path": path, "label": 1, "max_tokens_per_batch": max_tokens}
    scores = RewardModel(CPU, F32)(TEXTS, ROWS, options)
    expected = [by_hand(path, row["prompt"] + text, 1) for text, row in zip(TEXTS, ROWS, strict=True)]
    np.testing.assert_allclose(np.array(scores, dtype=float), expected, atol=1e-6)


def test_text_that_ends_with_the_padding_token(path: str) -> None:
    """Masks come from lengths: the padding token at the end of a text is read like any other."""
    texts = [" is<|endoftext|>", " is", " is four four"]
    ends, without, _ = RewardModel(CPU, F32)(texts, [{"prompt": "two"}] * 3, {"path": path})
    alone = RewardModel(CPU, F32)(texts[:1], [{"prompt": "two"}], {"path": path})[0]
    assert ends == pytest.approx(alone, abs=1e-6)
    assert abs(float(ends) - float(without)) > 1e-3  # type: ignore[arg-type]


def test_chat_template_of_the_reward_model(path: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = str(tmp_path_factory.mktemp("chat"))
    Qwen2ForSequenceClassification.from_pretrained(path).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(directory)
    row = {"prompt": [{"role": "system", "content": "be nice"}, {"role": "user", "content": "hi"}]}
    [score] = RewardModel(CPU, F32)(["yes"], [row], {"path": directory})
    assert score == pytest.approx(by_hand(path, "system be nice user hi assistant yes ", 0), abs=1e-6)


def test_sigmoid(path: str) -> None:
    raw = RewardModel(CPU, F32)([" yes"], ROWS[:1], {"path": path})[0]
    squashed = RewardModel(CPU, F32)([" yes"], ROWS[:1], {"path": path, "sigmoid": True})[0]
    assert isinstance(raw, float)
    assert squashed == pytest.approx(1 / (1 + np.exp(-raw)), abs=1e-6)


def test_in_a_scorer_beside_other_rewards(path: str) -> None:
    entry = {"name": "reward_model", "weight": 0.5, "options": {"path": path}}
    config = RewardConfig.model_validate({"functions": [entry, "repetition"], "num_workers": 0})
    scorer = Scorer(config, local=local_rewards(config, CPU, F32))
    responses = [Response([1], [0.0], text=text) for text in TEXTS[:2]]
    scores = scorer.score([Group(Prompt(0, [1], "", ROWS[0]), responses)])
    expected = [0.5 * by_hand(path, "two plus two" + text, 0) for text in TEXTS[:2]]
    np.testing.assert_allclose(scores.total, [expected], atol=1e-6)
    assert local_rewards(RewardConfig.model_validate({"functions": ["format"]}), CPU, F32) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the option path"),
        ({"path": "/no/such/model"}, "cannot be loaded"),
        ({"label": 2}, "has 2 outputs"),
        ({"max_length": 3}, "a text of 20 tokens, over max_length=3"),
    ],
)
def test_what_does_not_fit_says_so(path: str, options: dict[str, object], message: str) -> None:
    given = options if "path" in options or not options else {"path": path, **options}
    with pytest.raises(ValueError, match=message):
        RewardModel(CPU, F32)([" is four"], ROWS[:1], given)


def test_batches_hold_every_index_once_within_the_budget() -> None:
    lengths = [5, 1, 9, 3, 3, 20]
    groups = batches(lengths, 10)
    assert sorted(i for group in groups for i in group) == list(range(6))
    assert all(len(g) == 1 or len(g) * max(lengths[i] for i in g) <= 10 for g in groups)
    assert groups == [[1, 3, 4], [0], [2], [5]]
