import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from served import converted, plan_for
from test_serve_graphs import BUCKETS, inputs, wide

from loka.core.error import sqnr_db
from loka.serve import freeze, graphs
from loka.serve.sites import answering
from loka.serve.watch.agreement import LEAST_DB
from loka.serve.watch.monitor import EVERY

pytestmark = pytest.mark.gpu
DEVICE, POW2, ROW = "cuda", "torch_fast:rowwise_e4m3_pow2", "torch:rowwise_e4m3"


def rows(count, seed=0):
    return inputs(count, seed).to(DEVICE)


def model_of(seed):
    return wide(seed).to(DEVICE)


def plans(model):
    """Two rows with one site in FP8, more with three."""
    many = {"first": POW2, "second": POW2, "odd": ROW}
    return {2: plan_for(model, {"odd": ROW}), 16: plan_for(model, many)}


def frozen(model, plan, **options):
    calibration = [rows(40, seed) for seed in range(3)]
    return freeze(model, plan, calibration=calibration, autocast=torch.bfloat16, buckets=BUCKETS, **options)


def test_every_bucket_answers_as_its_program():
    """Bit for bit, padded rows included, and near to the model run eagerly."""
    model = model_of(0)
    server = frozen(model, plans(model))
    capturer = server._capturer
    for count in (1, 2, 9, 16):
        x = rows(count)
        answer = server(x)
        (bucket,) = answer.buckets
        padded = [torch.cat([x, x[-1:].expand(bucket - count, 16)])]
        graphs._plan_for(capturer._template, bucket)
        assert torch.equal(answer.output, capturer._programs.call(padded)()[:count])
        with answering(bucket):
            eager = server._run(server.current.module, padded)
        assert sqnr_db(answer.output, eager[:count]) > LEAST_DB
    assert set(server.apart()) == {"odd"}
    assert server.card.in_hp == (("first", "second"), ())


def test_without_graphs_it_answers_as_the_converted_model():
    model = model_of(0)
    plan = plans(model)[16]
    server, eager = frozen(model, plan, graphs=False), converted(model, plan)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        for count in BUCKETS:
            assert torch.equal(server(rows(count)).output, eager(rows(count)))


def test_new_weights_while_requests_go_on():
    """No request is lost, and each is answered by the weights of its version."""
    models = [model_of(seed) for seed in range(2)]
    server = frozen(models[0], plans(models[0]))
    requests, answers, done = [rows(count) for count in (1, 7, 30)], [], threading.Event()
    for model in (models[1], models[0]):
        server.refresh(model.state_dict())
        answers.append([server(x).output.clone() for x in requests])
    assert not torch.equal(answers[0][2], answers[1][2])

    def ask():
        seen = set()
        while not done.is_set():
            for x, each in zip(requests, zip(*answers, strict=True), strict=True):
                answer = server(x)
                seen.add(answer.version)
                assert torch.equal(answer.output, each[answer.version % 2])
        return seen

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        for turn in range(4):
            server.refresh(models[(turn + 1) % 2].state_dict())
        done.set()
    assert len(set.union(*(each.result() for each in asking))) > 1


def test_the_alarm_names_a_shift():
    model = model_of(0)
    server = frozen(model, plans(model)[16])
    for turn in range(2000):
        server(rows(16, turn % 8))
    assert server.alarms() == ()
    for turn in range(20_000):
        server(rows(16, turn % 8) * 20)
        if server.alarms():
            break
    assert {(alarm.site, alarm.kind) for alarm in server.alarms()} == {("first", "shift")}


def test_a_shift_is_named_within_a_hundred_requests():
    """By the graphs that show scales: nothing waits for them, so a look is read a request later or more."""
    model = model_of(0)
    server = frozen(model, plans(model)[16])
    for turn in range(40 * EVERY):
        server(rows(3, seed=turn))
    torch.cuda.synchronize()
    assert server.alarms() == ()
    for turn in range(100):
        server(rows(3, seed=turn) * 20)
        torch.cuda.synchronize()
    assert [(alarm.site, alarm.kind) for alarm in server.alarms()] == [("first", "shift")]
