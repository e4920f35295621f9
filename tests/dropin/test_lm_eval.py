"""lm-eval's `dsbd` model generates what its `hf` model generates. Skipped where lm-eval is not installed, which brings
half a hundred packages: run it in an environment of its own."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from dsbd_cli.config.model import BUILTIN_DRAFT, BUILTIN_TARGET, ModelSpec
from dsbd_cli.models.checkpoints.hub import locate
from training.tasks import QaGenerator

lm_eval = pytest.importorskip("lm_eval")

TASK = """
task: toyqa
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n", "question:"], max_gen_toks: 16, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.filterwarnings("ignore")
def test_the_same_samples_as_hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    import dsbd_cli.lm_eval as ours

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "qa.jsonl"
    records = islice(QaGenerator().records("test", 1), 6)
    data.write_text("".join(json.dumps({"prompt": r.prompt, "answer": " " + r.reference}) + "\n" for r in records))
    (tmp_path / "toyqa.yaml").write_text(TASK.format(data=data))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    target, draft = (locate(ModelSpec(name)) for name in (BUILTIN_TARGET, BUILTIN_DRAFT))
    samples = []
    for name, more in (("hf", ""), ("dsbd", ""), ("dsbd", f",assistant={draft}")):
        found = lm_eval.simple_evaluate(
            model=name, model_args=f"pretrained={target},dtype=float32{more}", tasks=["toyqa"], task_manager=tasks,
            batch_size=4, device="cpu", log_samples=True, bootstrap_iters=0,
        )  # fmt: skip
        samples.append([one["resps"] for one in found["samples"]["toyqa"]])
    assert samples[0] == samples[1] == samples[2]
    assert all(text for [[text]] in samples[0])
    assert get_model("dsbd") is ours.DsbdLM
