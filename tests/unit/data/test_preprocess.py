"""From YAML and raw rows to training prompts: nothing is lost, drops are counted, failures leave nothing behind."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from covey.config.schema import DataConfig
from covey.data import stats
from covey.data.indexed_dataset import IndexedDataset
from covey.data.load import load_prompts
from covey.data.preprocess import preprocess, run
from covey.data.settings import PreprocessConfig
from covey.data.workers import Job, Workers, load_tokenizer, make_handler, plan_workers, prepare_batches

ROOT = Path(__file__).resolve().parents[3]
SEED = ROOT.parent / "shared/fixtures/seed"
ROWS: list[dict[str, Any]] = [
    {"problem": "2+2=", "answer": "4", "task": "math", "labels": [1.0]},
    {"problem": "", "answer": "nothing", "task": "math", "labels": []},
    {"problem": "write " * 60, "answer": "x", "task": "code", "labels": [0.5, 2.0]},
    {"problem": "2+2=", "answer": "four", "task": "words", "labels": None},
    {"problem": "3+3=", "answer": None, "task": "math", "labels": [0.0]},
]
MAP = {"prompt": "problem", "response": "answer"}


@pytest.fixture
def config(tmp_path: Path, tokenizer_dir: str, write_jsonl: Callable[..., str]) -> Callable[..., PreprocessConfig]:
    """config(key=value, rows=[...]) -> settings whose output lies in tmp_path/out."""
    (tmp_path / "out").mkdir()

    def make(*, rows: list[dict[str, Any]] | None = None, **keys: Any) -> PreprocessConfig:
        given = {
            "input": write_jsonl(ROWS if rows is None else rows, "raw.jsonl"),
            "output_prefix": str(tmp_path / "out/data"),
            "tokenizer_name_or_path": tokenizer_dir,
            "map_keys": MAP,
        }
        return PreprocessConfig(**(given | keys))

    return make


def _load(prefix: str, tokenizer: Any, **keys: Any) -> Any:
    return load_prompts(prefix, tokenizer, DataConfig(train=prefix, **keys))


def _written(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "out").iterdir())


Make = Callable[..., PreprocessConfig]


def test_rows_reach_training_with_every_column_and_type(config: Make, tokenizer: Any, tmp_path: Path) -> None:
    made = config(dataset_additional_keys=["labels", "task"])
    preprocess(made)
    for source in ("out/data", "out/data.parquet", "out/data.manifest.json"):
        prompts = _load(str(tmp_path / source), tokenizer)
        assert [p.row for p in prompts] == [
            {**row, "prompt": row["problem"], "response": row["answer"]} for row in ROWS if row["problem"]
        ]
        assert [p.input_ids for p in prompts] == [
            tokenizer.encode(row["problem"], add_special_tokens=False) for row in ROWS if row["problem"]
        ]


def test_drops_and_lengths_are_counted(config: Make, tokenizer: Any) -> None:
    report = preprocess(config(seq_length=20, drop_duplicates=True))
    assert (report["rows_in"], report["rows_out"]) == (5, 2)
    assert report["drops"] == {"empty_prompt": 1, "too_long": 1, "duplicate": 1}
    assert report["rows_without_response"] == 1
    length = len(tokenizer.encode("2+2=", add_special_tokens=False))
    assert report["lengths"]["prompt"] == {str(length): 2}
    assert report["response_length"]["rows"] == 1


def test_prompts_of_seq_length_tokens_are_left_out_as_upstream_does(config: Make, tokenizer: Any) -> None:
    length = len(tokenizer.encode("3+3=", add_special_tokens=False))
    rows = [ROWS[4]]
    with pytest.raises(ValueError, match="none of 1 rows is left"):
        preprocess(config(rows=rows, seq_length=length))
    assert preprocess(config(rows=rows, seq_length=length + 1))["rows_out"] == 1


def test_labels_are_the_column_or_else_the_response(config: Make, tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"problem": "q", "answer": "a"}]
    preprocess(config(rows=rows, dataset_additional_keys=["labels"]))
    assert _load(str(tmp_path / "out/data"), tokenizer)[0].row["labels"] == "a"


def test_a_users_field_reaches_the_training_row(config: Make, tokenizer: Any, tmp_path: Path) -> None:
    handler = f"{ROOT}/examples/handlers/task_aware.py:TaskAwareInstructionHandler"
    preprocess(config(handler_name=handler, prompt_type="qwen_r1"))
    prompts = _load(str(tmp_path / "out/data"), tokenizer)
    plain = _load_fresh(config(prompt_type="qwen_r1"), tokenizer, tmp_path)
    assert [p.input_ids for p in prompts] == [p.input_ids for p in plain]
    for prompt in prompts:
        assert prompt.row["task_ids"] == tokenizer.encode(prompt.row["task"], add_special_tokens=False)


def _load_fresh(made: PreprocessConfig, tokenizer: Any, tmp_path: Path) -> Any:
    preprocess(made.model_copy(update={"output_prefix": str(tmp_path / "out/plain")}))
    return _load(str(tmp_path / "out/plain"), tokenizer)


def test_a_users_field_may_be_empty_in_the_first_batches(config: Make, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "from covey.data.handlers import AlpacaStyleInstructionHandler\n"
        "class Late(AlpacaStyleInstructionHandler):\n"
        "    def _tokenize_prompt(self, example):\n"
        "        return {**super()._tokenize_prompt(example), 'extra': [7] if example['n'] > 12000 else []}\n"
    )
    rows = [{"problem": "q", "n": i} for i in range(12003)]
    made = config(rows=rows, handler_name=f"{tmp_path}/late.py:Late", map_keys={"prompt": "problem"})
    preprocess(made)
    extra = [len(value) for value in parquet.read_table(tmp_path / "out/data.parquet")["extra"].to_pylist()]
    assert extra == [0] * 12001 + [1, 1]


def test_a_users_handler_may_render_by_itself(config: Make, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from covey.data.handlers import AlpacaStyleInstructionHandler\n"
        "class Own(AlpacaStyleInstructionHandler):\n"
        "    def _tokenize_prompt(self, example):\n"
        "        return {'input_ids': self.tokenizer.encode('Q ' + example['problem'], add_special_tokens=False)}\n"
    )
    preprocess(config(rows=ROWS[:1], handler_name=f"{tmp_path}/own.py:Own"))
    prompt = _load(str(tmp_path / "out/data"), tokenizer)[0]
    assert (prompt.text, prompt.row["prompt"]) == ("Q 2+2=", "2+2=")


def test_the_seeds_yaml_runs_with_its_sample_row(
    tokenizer: Any, tokenizer_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not SEED.is_dir():
        pytest.skip("the seed's files are not here")
    report = run(
        SEED / "preprocess.yaml",
        [f"input={SEED}/sample.jsonl", f"output_prefix={tmp_path}/p", f"tokenizer_name_or_path={tokenizer_dir}"],
    )
    sample = json.loads((SEED / "sample.jsonl").read_text())
    prompt = _load(f"{tmp_path}/p", tokenizer)[0]
    assert prompt.row == {**sample, "prompt": sample["problem"], "response": sample["answer"]}
    assert report["rows_out"] == 1
    assert "1 rows in, 1 rows out" in capsys.readouterr().out


def test_megatron_files_hold_the_same_ids_and_are_read_without_the_parquet(
    config: Make, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    preprocess(config(format="megatron", dataset_additional_keys=["task"], prompt_type="qwen"))
    whole = list(_load(str(tmp_path / "out/data"), tokenizer))
    ids = IndexedDataset(str(tmp_path / "out/data_packed_input_ids_document"))
    assert [ids[i].tolist() for i in range(len(ids))] == [p.input_ids for p in whole]
    mask = IndexedDataset(str(tmp_path / "out/data_packed_attention_mask_document"))
    assert [mask[i].tolist() for i in range(len(mask))] == [[1] * len(p.input_ids) for p in whole]
    for name in ("data.parquet", "data.manifest.json"):
        (tmp_path / "out" / name).unlink()
    indexed = _load(str(tmp_path / "out/data"), tokenizer)
    assert [(p.input_ids, p.text) for p in indexed] == [(p.input_ids, p.text) for p in whole]
    assert [p.row["response"] for p in indexed] == [p.row["response"] or "" for p in whole]
    assert [p.row["task"] for p in indexed] == [p.row["task"] for p in whole]
    assert indexed.stop_token_ids == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert "looks like: qwen" in caplog.text


def test_training_refuses_another_tokenizer_and_another_template(
    config: Make, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess(config(prompt_type="qwen"))
    prefix = str(tmp_path / "out/data")
    assert _load(prefix, tokenizer).stop_words == ("<|im_end|>",)
    with pytest.raises(ValueError, match="prompt_type=chat, but .* was preprocessed with qwen"):
        _load(prefix, tokenizer, prompt_type="chat")
    vocabulary = tokenizer.get_vocab()
    monkeypatch.setattr(tokenizer, "get_vocab", lambda: {**vocabulary, "new": len(vocabulary)})
    with pytest.raises(ValueError, match="preprocessed with another tokenizer"):
        _load(prefix, tokenizer)


def test_another_eos_at_training_is_warned_about_and_both_end_a_response(
    config: Make, tokenizer_dir: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    preprocess(config())
    other = load_tokenizer(tokenizer_dir)
    eos, other.eos_token = other.eos_token_id, "<|eot_id|>"
    assert _load(str(tmp_path / "out/data"), other).stop_token_ids == [eos]
    assert "both end a response" in caplog.text


def test_training_limits_apply_to_preprocessed_data(config: Make, tokenizer: Any, tmp_path: Path) -> None:
    preprocess(config())
    prefix = str(tmp_path / "out/data")
    prompts = _load(prefix, tokenizer, max_prompt_length=20)
    assert [p.text for p in prompts] == ["2+2=", "2+2=", "3+3="]
    assert prompts.drops == {"empty_prompt": 1, "too_long": 1}
    with pytest.raises(ValueError, match=r"row 2: the prompt has \d+ tokens"):
        _load(prefix, tokenizer, max_prompt_length=20, overlong_prompts="error")
    assert len(load_prompts(prefix, tokenizer, DataConfig(train=prefix), limit=2)) == 2
    with pytest.raises(ValueError, match="no prompt of at most 1 tokens"):
        _load(prefix, tokenizer, max_prompt_length=1)


def test_the_same_work_is_not_done_twice_unless_asked(config: Make, tmp_path: Path) -> None:
    assert preprocess(config())["cached"] is False
    first = (tmp_path / "out/data.parquet").stat().st_mtime_ns
    assert (
        preprocess(config().model_copy(update={"input": config().input}))["cached"] is False
    )  # the file was rewritten
    made = config()
    preprocess(made)
    again = preprocess(made)
    assert again["cached"] is True
    assert (again["rows_in"], again["drops"]) == (5, {"empty_prompt": 1})
    assert preprocess(made.model_copy(update={"seq_length": 20}))["cached"] is False
    assert preprocess(made.model_copy(update={"overwrite_cache": True}))["cached"] is False
    assert (tmp_path / "out/data.parquet").stat().st_mtime_ns > first


def test_a_failure_leaves_no_file_behind_and_no_old_data_half_replaced(
    config: Make, tokenizer: Any, tmp_path: Path
) -> None:
    preprocess(config(format="megatron"))
    before = {name: (tmp_path / "out" / name).read_bytes() for name in _written(tmp_path)}
    rows = [{"messages": [{"role": "user", "content": "q"}]}] * 1500 + [
        {"messages": [{"role": "critic", "content": ""}]}
    ]
    broken = config(rows=rows, handler_name="ChatTemplateHandler", map_keys=None, format="megatron")
    with pytest.raises(ValueError, match=r"raw.jsonl, row 1501: .*'critic'"):
        preprocess(broken)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in _written(tmp_path)} == before


@pytest.mark.parametrize("moment", ["before the manifest", "data cut short", "manifest not copied"])
def test_training_refuses_what_an_interrupted_run_left(
    config: Make, tokenizer: Any, tmp_path: Path, moment: str
) -> None:
    preprocess(config())
    data, manifest = tmp_path / "out/data.parquet", tmp_path / "out/data.manifest.json"
    if moment == "data cut short":
        data.write_bytes(data.read_bytes()[:-10])
    else:
        manifest.unlink()
    expected = r"bytes, but data.manifest.json says" if moment == "data cut short" else "manifest .* is not beside it"
    with pytest.raises(ValueError, match=expected):
        _load(str(data), tokenizer)


def test_preprocessed_and_raw_data_do_not_mix_and_several_sets_join(
    config: Make, tokenizer: Any, tmp_path: Path, write_jsonl: Callable[..., str]
) -> None:
    preprocess(config())
    preprocess(config(output_prefix=str(tmp_path / "out/more"), rows=ROWS[:1]))
    one, two = str(tmp_path / "out/data"), str(tmp_path / "out/more")
    both = load_prompts([one, two], tokenizer, DataConfig(train=[one, two]))
    assert len(both) == 5
    raw = write_jsonl(ROWS, "again.jsonl")
    with pytest.raises(ValueError, match="is preprocessed and .*again.jsonl is not"):
        load_prompts([one, raw], tokenizer, DataConfig(train=[one, raw]))


def test_settings_without_effect_on_preprocessed_data_are_warned_about(
    config: Make, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    preprocess(config())
    _load(str(tmp_path / "out/data"), tokenizer, system="Be brief.")
    assert "data.system has no effect" in caplog.text


def test_statistics_are_printed_later_with_the_share_a_limit_cuts(
    config: Make, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preprocess(config())
    report = stats.run(str(tmp_path / "out/data.parquet"), max_prompt_length=20, max_response_length=1)
    assert report["cut"]["prompt"] == {"limit": 20, "share": 0.25}
    longer = sum(len(tokenizer.encode(r["answer"])) > 1 for r in ROWS if r["problem"] and r["answer"])
    assert report["cut"]["response"]["share"] == longer / 3
    assert "25.00% longer than max_prompt_length=20" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no manifest beside it"):
        stats.run(str(tmp_path / "raw.jsonl"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"tokenizer_name_or_path": "./no/tokenizer"}, "no tokenizer at './no/tokenizer'.*hub id"),
        ({"handler_name": "Nope"}, "unknown handler 'Nope'"),
        ({"prompt_type": "qwen4"}, "unknown template 'qwen4'"),
        ({"map_keys": {"prompt": "Problem"}}, "mean 'problem'"),
        ({"dataset_additional_keys": ["Task"]}, "dataset_additional_keys: 'Task' is not a column.*mean 'task'"),
        ({"prompt_type": "qwen", "enable_thinking": True}, "enable_thinking has no effect with prompt_type: qwen"),
        ({"input": "no.jsonl"}, "no.jsonl: no such file"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_do(
    config: Make, tmp_path: Path, keys: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        preprocess(config(**keys))
    assert _written(tmp_path) == []


def test_no_more_processes_than_cores_or_work() -> None:
    cores = len(os.sched_getaffinity(0))
    assert plan_workers(10**4, 100) == Workers(1, cores)
    assert plan_workers(1, 10**6) == Workers(1, 1)
    assert plan_workers(10**4, 10**9) == Workers(cores, 1)


@pytest.mark.slow
def test_processes_and_threads_give_the_same_rows_in_the_same_order(config: Make, tokenizer: Any) -> None:
    rows = [{"problem": f"{i} " * (i % 30), "answer": str(i)} for i in range(2500)]
    job = Job(config(rows=rows, seq_length=40), ["problem", "answer"], "raw.jsonl")
    tables = [pa.Table.from_pylist(rows[i : i + 300]) for i in range(0, 2500, 300)]
    handler = make_handler(job, tokenizer)
    one = list(prepare_batches(job, handler, iter(tables), Workers(1, 1)))
    for workers in (Workers(2, 1), Workers(1, 2)):
        several = list(prepare_batches(job, handler, iter(tables), workers))
        assert [(n, p.table.to_pylist(), p.drops) for n, p in several] == [
            (n, p.table.to_pylist(), p.drops) for n, p in one
        ]
        assert [p.response_lengths.tolist() for _, p in several] == [p.response_lengths.tolist() for _, p in one]
    bad = [*tables, pa.table({"problem": [[{"role": "critic", "content": ""}]], "answer": ["x"]})]
    with pytest.raises(ValueError, match="row 2501: .*critic"):
        list(prepare_batches(job, handler, iter(bad), Workers(2, 1)))


def test_progress_is_a_line_every_so_many_rows_where_there_is_no_terminal(
    config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"problem": "q", "answer": "a"}] * 2500
    with caplog.at_level(logging.INFO, logger="covey"):
        preprocess(config(rows=rows, log_interval=1000), show=True)
    assert [r.message.split(" (")[0] for r in caplog.records] == ["1,000 of 2,500 rows", "2,000 of 2,500 rows"]
