"""`Engine.run(ordered=False)`: results as they are done."""

from __future__ import annotations

from dsbd_cli import Engine, MethodConfig, Request, RowError, SamplingConfig
from tests.helpers.toys import NumberCodec, table_pair


def test_a_long_request_holds_no_short_one_back() -> None:
    """The same results, each with the very request it answers; an item that is an error comes through too."""
    engine = Engine(
        table_pair(0, 9, 0.0)[0],
        None,
        NumberCodec(9),
        MethodConfig(num_beams=2, depth=0),
        batch_size=3,
    )
    lengths = {"long": 12, "short": 1, "middle": 5}
    requests = [
        Request("3 4", id=name, seed=1, sampling=SamplingConfig(max_new_tokens=count, top_k=0))
        for name, count in lengths.items()
    ]
    error = RowError("a bad row")
    wanted = {result.request.id: result.hypotheses for result in engine.run(requests)}
    results = list(engine.run([*requests, error], ordered=False))
    answered = [result for result in results if result.error is None]
    assert [result.error for result in results if result.error is not None] == [error]
    assert [result.request.id for result in answered] == ["short", "middle", "long"]
    assert all(any(result.request is request for request in requests) for result in answered)
    assert {result.request.id: result.hypotheses for result in answered} == wanted
