"""A worker without Ray: a thread with an engine, an inbox and an outbox."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import dsbd_cli
from dsbd_cli import MethodConfig, Request, SamplingConfig, UsageError, loading
from dsbd_cli.errors import DsbdError
from dsbd_cli.ops.interface import OpChoice
from dsbd_cli.requests import EngineInfo
from dsbd_cli.scale import Answer
from dsbd_cli.scale.worker import NO_REQUEST, Exchange, Failure, Worker, WorkerInfo, WorkerSetup
from tests.helpers.fake import FakeEngine

METHOD = MethodConfig(num_beams=2)
HANG_S = 600.0  # only so that a fault does not hang the suite


def fake(before: Callable[[str], None] | None = None) -> FakeEngine:
    return FakeEngine(METHOD, 4, log_steps=False, before=before)


def worker(load: Any = fake, *, owns_process: bool = False) -> Worker:
    return Worker(WorkerSetup(load, (), 4), owns_process=owns_process)


def greeted(made: Worker) -> WorkerInfo | Failure:
    while (told := made.hello()) is None:
        continue
    return told


def row(number: int, prompt: str) -> tuple[int, Request]:
    return number, Request(prompt, id=str(number), seed=0)


def drained(made: Worker, count: int) -> dict[int, Any]:
    drained_answers: dict[int, Any] = {}
    limit = time.monotonic() + HANG_S
    while len(drained_answers) < count:
        assert time.monotonic() < limit
        exchange = made.exchange(())
        assert exchange.failure is None
        drained_answers |= dict(exchange.answers)
    return drained_answers


def test_rows_come_back_under_their_numbers() -> None:
    made = worker()
    info = greeted(made)
    assert isinstance(info, WorkerInfo)
    assert info.exactness == "same-text"
    made.put([row(7, "a"), row(3, "fail"), row(9, "b")])
    results = drained(made, 3)
    assert results[7].text == "a!0"
    assert results[9].text == "b!0"
    assert "900 tokens" in str(results[3].error)
    assert all(result.request == NO_REQUEST for result in results.values()), "the driver has the requests"


def test_an_exchange_answers_though_the_engine_is_at_work() -> None:
    """The driver takes silence for a process that hangs."""
    begun, gate = threading.Event(), threading.Event()

    def before(prompt: str) -> None:
        begun.set()
        gate.wait(HANG_S)

    made = worker(partial(fake, before))
    greeted(made)
    made.put([row(0, "a")])
    assert begun.wait(HANG_S)
    assert made.exchange((), wait_s=0.1) == Exchange([], 0, exactness="same-text")
    gate.set()
    assert list(drained(made, 1)) == [0]


def test_a_kernel_that_fails_at_a_worker_takes_the_promise_of_the_run_with_it() -> None:
    """Guards records that say same-text of answers made after it."""
    pytest.importorskip("ray")
    from dsbd_cli.scale.window import Window
    from dsbd_cli.scale.workers import PoolConfig, RayEngine, WorkerReport, _WorkerSlot

    class Failing(FakeEngine):
        exactness = "same-text"

    engine = Failing(METHOD, 4, log_steps=False)
    made = worker(lambda: engine)
    info = greeted(made)
    driver = RayEngine(WorkerSetup(fake, (), 4), PoolConfig(1, 1, "auto"), lambda line: None, lambda line: None)
    driver._window = window = Window(4, None)
    slot = _WorkerSlot(WorkerReport(0))
    answered = []
    try:
        driver._joined(slot, info)
        for promised in ("same-text", "same-law"):
            engine.exactness = promised
            window.read(row(0, "a")[1])
            exchange = made.exchange(window.take(slot.number), wait_s=HANG_S)
            while not exchange.answers:
                exchange = made.exchange((), wait_s=HANG_S)
            driver._answered(slot, exchange)
            answered += [(driver.exactness, result.text) for _, result in window.ready()]
    finally:
        driver.close()
    assert answered == [("same-text", "a!0"), ("same-law", "a!0")]


@pytest.mark.parametrize("answered", [False, True])
def test_a_model_that_ends_every_process_ends_the_run(answered: bool) -> None:
    """Guards a load of the model for every row of the input. Rows that kill workers do not, once one was answered."""
    pytest.importorskip("ray")
    from dsbd_cli.scale.window import Window
    from dsbd_cli.scale.workers import USELESS_DEATHS, PoolConfig, RayEngine, WorkerReport, _WorkerSlot

    driver = RayEngine(WorkerSetup(fake, (), 4), PoolConfig(1, 1, "auto"), lambda line: None, lambda line: None)
    driver._window = window = Window(4, None)
    slot = _WorkerSlot(WorkerReport(0, rows=int(answered)))
    driver._workers = [slot]
    for number in range(60):
        window.read(row(number, "a")[1])

    def kill_all() -> None:
        while not window.finished:
            window.join(0)
            window.take(0)
            driver._died(slot, "killed")
            list(window.ready())

    try:
        if answered:
            kill_all()
            assert slot.report.deaths > USELESS_DEATHS
        else:
            message = f"{USELESS_DEATHS} workers died before a row was answered, the last one was worker 0: killed"
            with pytest.raises(DsbdError, match=message):
                kill_all()
    finally:
        driver.close()


def test_an_exchange_gathers_answers_while_the_engine_has_rows() -> None:
    """A message for each answer would cost the driver more than the answer: 1,000 workers could not be fed. The engine
    reads 4 rows and answers them, reads 4 more and is at work on the first of these."""
    loading, gate = threading.Event(), threading.Event()

    def before(prompt: str) -> None:
        if prompt >= "4":
            gate.wait(60)

    def load() -> FakeEngine:
        loading.wait(HANG_S)
        return fake(before)

    made = worker(load)
    made.put([row(number, str(number)) for number in range(8)])
    loading.set()
    exchange = made.exchange((), wait_s=HANG_S)
    gate.set()
    assert len(exchange.answers) >= 4, "it ended before the engine had read the rows"
    assert len(exchange.answers) < 8, "it did not end when the engine had read them"


def lines_of(made: Worker) -> list[str]:
    """Lines up to the answer of the one row that it has."""
    lines: list[str] = []
    while (exchange := made.exchange((), wait_s=HANG_S)) and not exchange.answers:
        assert exchange.failure is None
        lines += exchange.lines
    return [*lines, *exchange.lines]


@pytest.fixture
def library_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the process logs, though a command of another test may have set how it is printed."""
    monkeypatch.setattr(logging.getLogger("dsbd_cli"), "propagate", True)
    caplog.set_level(logging.WARNING, "dsbd_cli")
    return caplog


def logs(prompt: str) -> None:
    logging.getLogger("dsbd_cli.models.tokenizer").warning("a line about %s", prompt)
    logging.getLogger("dsbd_cli.models.tokenizer").info("not this one")


def test_what_the_library_warns_of_goes_to_the_driver_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards lines that only the log of a worker holds, and a handler that outlives its worker."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    before = list(logging.getLogger("dsbd_cli").handlers)
    made = worker(lambda: fake(logs), owns_process=True)
    made.put([row(0, "x")])
    assert lines_of(made) == ["a line about x"]
    assert made.exchange((), wait_s=0).lines == ()
    made.put([row(1, "crash")])
    while made.exchange((), wait_s=HANG_S).failure is None:
        continue
    assert logging.getLogger("dsbd_cli").handlers == before


def test_the_log_of_a_process_with_several_workers_is_left_to_it(library_log: pytest.LogCaptureFixture) -> None:
    """Guards lines that each of two Answers in one process reports, whichever engine they are of."""
    first, second = worker(lambda: fake(logs)), worker()
    first.put([row(0, "x")])
    assert lines_of(first) == []
    second.put([row(0, "y")])
    assert lines_of(second) == []
    assert library_log.messages == ["a line about x"]


def test_what_an_engine_tells_of_its_rows_goes_to_the_driver() -> None:
    """Guards lines that go to the warnings of a worker's process, which nobody reads."""

    def load() -> FakeEngine:
        engine = fake(lambda prompt: engine.tell(f"a line about {prompt}"))
        return engine

    first, second = worker(load), worker(load)
    for made, prompt in ((first, "x"), (second, "y")):
        made.put([row(0, prompt)])
        assert lines_of(made) == [f"a line about {prompt}"]


def test_a_line_of_several_workers_is_said_once() -> None:
    pytest.importorskip("ray")
    from dsbd_cli.scale.workers import PoolConfig, RayEngine, WorkerReport, _WorkerSlot

    said = list[str]()
    driver = RayEngine(WorkerSetup(fake, (), 4), PoolConfig(2, 2, "auto"), said.append, lambda line: None)
    try:
        for number, lines in enumerate((("a",), ("a", "b"))):
            slot = _WorkerSlot(WorkerReport(number))
            made = worker()
            driver._joined(slot, greeted(made))
            driver._answered(slot, replace(made.exchange((), wait_s=0), lines=lines))
    finally:
        driver.close()
    assert said == ["a", "b"]


def test_hello_answers_while_models_are_loading() -> None:
    gate = threading.Event()

    def load() -> FakeEngine:
        gate.wait(HANG_S)
        return fake()

    made = worker(load)
    assert made.hello(0.01) is None
    gate.set()
    assert isinstance(greeted(made), WorkerInfo)


def test_an_engine_that_cannot_load_or_breaks_says_why() -> None:
    def load() -> FakeEngine:
        raise UsageError("num_beams is 0")

    told = greeted(worker(load))
    assert isinstance(told, Failure)
    assert isinstance(told.error, UsageError)
    made = worker()
    greeted(made)
    made.put([row(0, "a"), row(1, "crash")])
    exchanges = [made.exchange(())]
    while exchanges[-1].failure is None:
        exchanges.append(made.exchange(()))
    assert [number for exchange in exchanges for number, _ in exchange.answers] == [0]
    assert str(exchanges[-1].failure) == "RuntimeError: a bug in two lines"
    assert exchanges[-1].failure.error is None  # another worker may do better


def test_what_an_engine_tells_goes_to_the_driver() -> None:
    """Guards lines such as the token rules that are not applied, which no user sees in a worker's log."""

    def load() -> FakeEngine:
        made = fake()
        made.info = EngineInfo(
            "target", None, "float32", "cpu", notes=("a", "b"), ops=(OpChoice("verify", "torch", "it fails"),)
        )
        return made

    told = greeted(worker(load))
    assert isinstance(told, WorkerInfo)
    assert told.engine == load().info


def test_workers_that_differ_are_told_apart() -> None:
    info = EngineInfo("target", None, "float32", "cuda:0", threads=1)
    worker = WorkerInfo("1.0", ("a", "b"), "same-text", None, "host", info)
    alike = replace(worker, host="other", engine=replace(info, device="cuda:3", draft_device="cuda:4", threads=2))
    assert worker.difference(alike) is None
    assert worker.difference(replace(worker, dsbd="1.1")) == "dsbd is 1.1 there and 1.0 here"
    assert worker.difference(replace(worker, checkpoints=("a", "c"))) is not None
    assert worker.difference(replace(worker, engine=replace(info, device="cpu"))) == "device is cpu there and cuda here"
    for change in ({"dtype": "bfloat16"}, {"draft_dtype": "float32"}, {"chat": True}):
        assert worker.difference(replace(worker, engine=replace(info, **change))) is not None


# Answer: the same for Ray Data


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    monkeypatch.setattr(loading, "load", lambda *_, **__: fake())
    return Answer(sampling=SamplingConfig(n_best=2))


def test_a_row_per_row_with_an_error_column(answer: Answer) -> None:
    batch = {"url": ["u", "v", "w"], "prompt": ["a", "fail", None]}
    made = answer.answer(batch)
    assert made["url"] == ["u", "v", "w"]
    assert made["text"] == ["a!0", None, None]
    assert made["error"][0] is None
    assert str(made["error"][1]).startswith("PromptTooLongError: prompt has 900 tokens")
    assert made["error"][2] == "InvalidRowError: neither prompt nor messages is given"
    assert [beam["text"] for beam in made["beams"][0]] == ["a!0", "a!1"]  # type: ignore[index, attr-defined]


def test_what_the_engine_of_an_answer_tells_goes_to_the_log(
    monkeypatch: pytest.MonkeyPatch, library_log: pytest.LogCaptureFixture
) -> None:
    """Once, beside another Answer of the process, and where Python's warnings are errors: such an error ended the
    thread that collects answers, and the batch waited for ever."""

    def load(*_: object, **__: object) -> FakeEngine:
        engine = fake(lambda prompt: engine.tell(f"a line about {prompt}"))
        return engine

    monkeypatch.setattr(loading, "load", load)
    answers = [Answer(), Answer()]
    for each, prompt in zip(answers, ("x", "y"), strict=True):
        assert each.answer({"prompt": [prompt]})["error"] == [None]
    assert library_log.messages == ["a line about x", "a line about y"]


def test_the_draft_is_that_of_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other target than the built-in one was refused beside the built-in draft."""
    loaded = list[object]()
    monkeypatch.setattr(loading, "load", lambda *models, **_: loaded.extend(models) or fake())
    Answer("my-llama")
    assert loaded == ["my-llama", "auto"]


def test_ids_are_those_of_a_table_with_empty_cells(answer: Answer) -> None:
    rows: list[dict[str, object]] = [{"prompt": "a", "id": row_id} for row_id in (3, 3.0, "3", float("nan"), None)]
    made = [answer._request(row) for row in rows]
    names = [request.id for request in made if isinstance(request, Request)]
    assert names[:3] == ["3"] * 3
    assert names[3] == names[4] != "nan"


def test_batches_overlap(answer: Answer) -> None:
    """Two batches of an event loop are answered together: a batch's suffix does not leave the engine idle."""

    async def generated(prompt: str) -> list[object]:
        return [item["text"] async for item in answer({"prompt": [prompt, "b"]})]

    async def both() -> list[list[object]]:
        return await asyncio.gather(generated("pause"), generated("c"))

    assert asyncio.run(both()) == [[["pause!0", "b!0"]], [["c!0", "b!0"]]]


@pytest.mark.parametrize(
    ("batch", "message"), [({"x": ["a"]}, "neither prompt nor"), ({"prompt": ["a"], "text": ["b"]}, "a column text")]
)
def test_columns_that_cannot_be_used(answer: Answer, batch: dict[str, list[object]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        answer.answer(batch)


def test_an_answer_of_the_built_in_pair_is_the_engines() -> None:
    """Seeds, texts and scores are those of Engine.run with the same ids."""
    prompts = ["sql:\n", "question:"]
    sampling = SamplingConfig(max_new_tokens=8)
    made = Answer(method=METHOD, sampling=sampling).answer({"prompt": prompts, "id": [0, 1]})
    engine = dsbd_cli.load(method=METHOD)
    wanted = list(engine.run([Request(prompt, sampling=sampling) for prompt in prompts]))
    assert made["text"] == [result.text for result in wanted]
    assert made["logprob"] == [result.hypotheses[0].logprob for result in wanted]
