"""``moontide.ep``: worlds of processes whose results equal a reference bit by bit, whoever is killed when; and in threads of
this process, what is refused, what is lent, and who comes back."""

from __future__ import annotations

import hashlib
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ep_ranks import DEADLINE, PATIENCE, STEPS
from test_fork import in_child

import moontide
from moontide.ep import Channel, Excluded, RanksMissing, World, reference

PROGRAM = Path(__file__).with_name("ep_ranks.py")
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "experts.py"
KILLED = -signal.SIGKILL

SMALL: dict[str, Any] = {"tokens_max": 3, "hidden": 4, "top_k": 2, "experts_per_rank": 2, "send": "float32"}


def play(path: Path, scene: str, ranks: int, seed: int, extra: str = "") -> list[tuple[int, list[str]]]:
    """Runs a world of processes; how each ended, and what it said."""
    words = [[sys.executable, str(PROGRAM), scene, str(path), str(rank)] for rank in range(ranks)]
    running = [
        subprocess.Popen([*each, str(ranks), str(seed), extra], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for each in words
    ]
    try:
        with ThreadPoolExecutor(ranks) as pool:
            said = list(pool.map(lambda process: process.communicate(timeout=100), running))
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, said, strict=True):
        assert process.returncode in (0, KILLED), errors
    return [(process.returncode, out.splitlines()) for process, (out, _) in zip(running, said, strict=True)]


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A name for a world: short, since sockets have short ones."""
    return tmp_path_factory.mktemp("ep") / "world"


def in_threads(path: Path, play: Callable[[World, Channel], Any], ranks: int = 2, **settings: Any) -> list[Any]:
    """The ranks of a world as threads of this process; what each returns."""
    settings = SMALL | settings

    def rank(number: int) -> Any:
        size = Channel.bytes(ranks=ranks, **{name: settings[name] for name in settings if name != "leaves_behind"})
        with World(path, number, ranks, size, timeout=PATIENCE) as world:
            with Channel(world, **settings, timeout=PATIENCE) as channel:
                return play(world, channel)

    with ThreadPoolExecutor(ranks) as pool:
        return [each.result(100) for each in [pool.submit(rank, number) for number in range(ranks)]]


ONE = (np.full((1, 4), 3, "float32"), np.array([[0, 3]]), np.array([[0.5, 0.25]], "float32"))
NONE = (np.zeros((0, 4), "float32"), np.zeros((0, 2), "int32"), np.zeros((0, 2), "float32"))


def echo(packed: Any, _rows: Any) -> Any:
    """Experts that return what they got."""
    return packed


def step(channel: Channel) -> None:
    """An ordinary step: one token to both ranks."""
    results, ranks = channel.moe_forward(*ONE, echo, timeout=PATIENCE)
    assert ranks == (0, 1)
    assert (results == 2.25).all()


# ------------------------------------------------------------------------------------------------------ processes


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_are_those_of_the_reference_on_every_run(path, seed, ranks):
    runs = [play(path.with_name(f"run-{run}"), "sweep", ranks, seed) for run in range(2)]
    assert all(code == 0 and len(lines) == 1 for run in runs for code, lines in run)
    assert runs[0] == runs[1], "the same bits"


def test_eight_ranks(path, seed):
    assert [code for code, _ in play(path, "sweep", 8, seed)] == [0] * 8


def test_ranks_may_die_and_the_others_go_on(path, seed):
    """One before it sends, one when it has received: each is named in time, and nobody else is."""
    ended = play(path, "mortal", 4, seed, "3@4:idle,1@8:received")
    assert [code for code, _ in ended] == [0, KILLED, 0, KILLED]
    lines = {rank: lines for rank, (code, lines) in enumerate(ended) if code == 0}
    for said in lines.values():
        assert [line for line in said if not line.startswith("late")] == ["lost 4 3", "lost 8 1", "done 0 2"]
    late = [line.split()[1:] for said in lines.values() for line in said if line.startswith("late")]
    # Who waited a little less long than another finds that he has been left behind already.
    assert {who for who, _ in late} == {"1", "3"}
    assert all(DEADLINE * 0.9 < float(seconds) < DEADLINE + 5 for _, seconds in late), late
    assert STEPS > 8


def test_the_example_agrees_with_the_reference():
    if not EXAMPLE.is_file():
        pytest.skip("the examples are not here")
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "bit by bit" in done.stdout


# -------------------------------------------------------------------------------------------------- worlds, members


def test_a_world_and_its_members(path):
    def rank(world: World, channel: Channel) -> None:
        assert world.barrier(PATIENCE) == (0, 1)
        assert (world.ranks, world.generation, world.bytes % 4096) == (2, 1, 0)
        assert channel.members == (0, 1)
        assert channel.rank == world.rank
        assert [world.liveness(rank, ttl=1000) for rank in (0, 1)] == ["alive", "alive"]
        world.beat()
        step(channel)

    in_threads(path, rank)


def test_who_is_late_is_named_and_may_still_come(path):
    def rank(world: World, channel: Channel) -> None:
        if channel.rank == 1:
            world.barrier(PATIENCE)
            return step(channel)
        sent = channel.send(*ONE)
        for _ in range(2):
            with pytest.raises(RanksMissing, match="no sign of rank 1 in time; wait again, or leave") as late:
                sent.wait(0.05)
            assert late.value.ranks == (1,)
            assert isinstance(late.value, TimeoutError) and late.value.retryable
            assert pickle.loads(pickle.dumps(late.value)).ranks == (1,)
        world.barrier(PATIENCE)
        received = sent.wait_packed(timeout=PATIENCE)
        received.scatter(received.packed)
        results, _ = received.combine(timeout=PATIENCE)
        assert (results == 2.25).all()

    in_threads(path, rank)


def test_who_was_left_behind_learns_it_and_rejoins(path):
    def rank(world: World, channel: Channel) -> None:
        if channel.rank == 0:
            with pytest.raises(RanksMissing):
                channel.moe_forward(*ONE, echo, timeout=0.05)
            with pytest.raises(moontide.InvalidArgument, match="abandon it first"):
                channel.send(*ONE)
            channel.leave_behind([1])
            channel.abandon(PATIENCE)
            results, ranks = channel.moe_forward(*ONE, echo, timeout=PATIENCE)
            assert ranks == (0,) and (results == 1.5).all(), "the other's experts count nothing"
            world.barrier(PATIENCE)
            world.barrier(PATIENCE)
            while channel.members != (0, 1):
                channel.moe_forward(*NONE, echo, timeout=PATIENCE)
        else:
            world.barrier(PATIENCE)
            with pytest.raises(Excluded, match="may rejoin"):
                channel.send(*ONE)
            with pytest.raises(Excluded):
                channel.members  # noqa: B018
            with pytest.raises(RanksMissing):
                channel.rejoin(0)
            with pytest.raises(Excluded):
                channel.send(*ONE)
            world.barrier(PATIENCE)
            channel.rejoin(PATIENCE)
        step(channel)

    in_threads(path, rank)


def test_a_channel_may_leave_late_ranks_behind_by_itself(path):
    def rank(world: World, channel: Channel) -> None:
        if channel.rank == 0:
            results, ranks = channel.moe_forward(*ONE, echo, timeout=0.05)
            assert ranks == (0,) and (results == 1.5).all()
        world.barrier(PATIENCE)

    in_threads(path, rank, leaves_behind=True)


def test_a_new_process_takes_the_place_of_one_that_left(path):
    size = Channel.bytes(ranks=2, **SMALL)
    left, missed = threading.Event(), threading.Event()

    def first() -> None:
        with World(path, 0, 2, size, timeout=PATIENCE) as world, Channel(world, **SMALL, timeout=PATIENCE) as channel:
            step(channel)
            assert left.wait(PATIENCE)
            assert world.liveness(1) == "absent"
            with pytest.raises(RanksMissing):
                channel.moe_forward(*NONE, echo, timeout=0.05)
            channel.leave_behind([1])
            channel.abandon(PATIENCE)
            missed.set()
            while channel.members != (0, 1):
                channel.moe_forward(*NONE, echo, timeout=PATIENCE)
            step(channel)

    def second() -> None:
        with World(path, 1, 2, size, timeout=PATIENCE) as world, Channel(world, **SMALL, timeout=PATIENCE) as channel:
            step(channel)
        left.set()
        assert missed.wait(PATIENCE)
        with World(path, 1, 2, size, timeout=PATIENCE) as world:
            assert world.generation == 2
            with Channel(world, **SMALL, timeout=PATIENCE) as channel:
                step(channel)

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(first), pool.submit(second)]:
            each.result(100)


def test_several_channels_lie_in_one_world(path):
    size = Channel.bytes(ranks=1, **SMALL)
    with World(path, 0, 1, 3 * size) as world:
        channels = [Channel(world, **SMALL), Channel(world, **SMALL)]
        with pytest.raises(moontide.InvalidArgument, match="was opened within"):
            Channel(world, **SMALL, offset=64)
        channels.append(Channel(world, **SMALL, offset=2 * size))
        with pytest.raises(moontide.InvalidArgument, match="does not fit"):
            Channel(world, **(SMALL | {"tokens_max": 100000}))
        sent = [channel.send(ONE[0], np.array([[0, 1]]), ONE[2]) for channel in channels]
        for each in reversed(sent):
            received = each.wait_packed()
            received.scatter(received.packed)
            assert (received.combine()[0] == 2.25).all()
        channels[0].close()
        with pytest.raises(moontide.InvalidArgument, match="was opened within"):
            Channel(world, **SMALL, offset=0)


# ------------------------------------------------------------------------------------------------ alone in a world


@pytest.fixture
def alone(path: Path) -> Iterator[Channel]:
    with World(path, 0, 1, 1 << 20) as world, Channel(world, **SMALL) as channel:
        yield channel


LOCAL = (np.arange(8, dtype="float32").reshape(2, 4), np.array([[0, 1], [1, -1]]), np.full((2, 2), 0.5, "float32"))


def test_a_step_that_is_over_cannot_be_used(alone):
    sent = alone.send(*LOCAL)
    received = sent.wait_packed()
    with pytest.raises(moontide.InvalidArgument, match="waited for already"):
        sent.wait()
    with pytest.raises(moontide.InvalidArgument, match="scatter what"):
        received.combine()
    rows = received.tokens(0)
    assert repr(rows) == "<moontide.ep.TokenRows of rank 0 [2, 4]>"
    received.scatter(received.packed)
    results, ranks = received.combine()
    assert results.tolist() == [[0, 1, 2, 3], [2, 2.5, 3, 3.5]] and ranks == (0,)
    for use in (
        lambda: received.combine(),
        lambda: received.scatter(received.packed),
        lambda: received.rows_per_expert,
        lambda: received.group(0),
        lambda: received.tokens(0),
        lambda: sent.wait(),
    ):
        with pytest.raises(moontide.Closed, match="the step is over"):
            use()
    for use in (memoryview, np.asarray, np.array, lambda rows: rows.numpy()):
        with pytest.raises(BufferError, match="the step is over"):
            use(rows)


def test_rows_are_lent_in_place_and_hold_the_step_up(alone):
    tokens = LOCAL[0].copy()
    received = alone.send(tokens, *LOCAL[1:]).wait()
    assert received.packed is None
    array = received.tokens(0).numpy()
    assert not array.flags.writeable and np.shares_memory(array, tokens)
    received.scatter(np.zeros((2, 3, 4), "float32"))
    for go_on in (received.combine, alone.abandon, alone.rejoin, alone.close):
        with pytest.raises(BufferError, match="lent to 1 arrays; drop them"):
            go_on()
    assert (array == tokens).all()
    with pytest.raises(TypeError, match="read-only"):
        memoryview(received.tokens(0))[0, 0] = 1
    del array
    assert (received.combine()[0] == 0).all()


def test_rows_of_others_have_gaps_that_numpy_steps_over(path):
    def rank(_world: World, channel: Channel) -> None:
        tokens = np.full((2, 4), channel.rank + 1, "float32")
        routes = np.array([[0, 2], [1, 3]])
        received = channel.send(tokens, routes, np.ones((2, 2), "float32")).wait(PATIENCE)
        other = received.tokens(1 - channel.rank)
        assert len(other) == 2 and other.shape == (2, 4) and other.source == 1 - channel.rank
        assert other.numpy().strides == (64, 4)
        assert (other.numpy() == 2 - channel.rank).all()
        with pytest.raises(BufferError, match="gaps"):
            hashlib.sha256(other)
        received.scatter(np.ones((2, 6, 4), "float32"))
        assert (received.combine(timeout=PATIENCE)[0] == 2).all()

    in_threads(path, rank)


def test_results_may_be_written_over_the_tokens(alone):
    tokens = LOCAL[0].copy()
    results, _ = alone.moe_forward(tokens, *LOCAL[1:], lambda packed, rows: packed * 2, out=tokens)
    assert results is tokens
    assert tokens.tolist() == [[0, 2, 4, 6], [4, 5, 6, 7]]


def test_packed_rows_may_not_be_the_tokens(path):
    with World(path, 0, 1, 1 << 20) as world:
        channel = Channel(world, **(SMALL | {"tokens_max": 1, "experts_per_rank": 1, "top_k": 1}))
        tokens = np.ones((1, 4), "float32")
        sent = channel.send(tokens, np.array([[0]]), np.ones((1, 1), "float32"))
        with pytest.raises(moontide.InvalidArgument, match="in common"):
            sent.wait_packed(tokens.reshape(1, 1, 4))
        assert sent.wait_packed().packed.tolist() == [[[1] * 4]]
        channel.abandon()
        channel.close()


def test_what_experts_raise_ends_the_step(path):
    def rank(_world: World, channel: Channel) -> None:
        def fails(_packed: Any, _rows: Any) -> Any:
            raise RuntimeError("no such weights")

        if channel.rank == 0:
            with pytest.raises(RuntimeError, match="no such weights"):
                channel.moe_forward(*ONE, fails, timeout=PATIENCE)
        else:
            results, ranks = channel.moe_forward(*ONE, echo, timeout=PATIENCE)
            assert ranks == (1,) and (results == 0.75).all()
        step(channel)

    in_threads(path, rank)


@pytest.mark.parametrize(
    ("tokens", "experts", "weights", "message"),
    [
        (np.zeros((2, 5), "float32"), LOCAL[1], LOCAL[2], r"tokens must be an array \[tokens, 4\] of float32, not \[2, 5\]"),
        (np.zeros((2, 4), "float64"), LOCAL[1], LOCAL[2], "of float32, not .* of float64"),
        (LOCAL[0], LOCAL[1].astype("uint8"), LOCAL[2], "experts must be .* of int32 or int64"),
        (LOCAL[0], LOCAL[1][:, :1], LOCAL[2], r"experts must be an array \[tokens, 2\]"),
        (LOCAL[0], LOCAL[1], LOCAL[2].astype("float16"), "weights must be .* of float32, not .* of float16"),
        (LOCAL[0][:1], LOCAL[1], LOCAL[2], "are not the same number of tokens"),
        (LOCAL[0], np.array([[0, 1], [2, -1]]), LOCAL[2], "token 1 goes to expert 2; there are 2"),
        (LOCAL[0], np.array([[0, 1], [1 << 40, -1]]), LOCAL[2], "token 1 goes to expert"),
        (LOCAL[0], np.array([[0, 0], [1, -1]]), LOCAL[2], "token 0 goes to expert 0 twice"),
        (np.zeros((4, 4), "float32"), np.full((4, 2), -1), np.zeros((4, 2), "float32"), "4 tokens in a channel for 3"),
    ],
)
def test_tokens_that_make_no_sense_are_refused(alone, tokens, experts, weights, message):
    with pytest.raises(moontide.InvalidArgument, match=message):
        alone.send(tokens, experts, weights)
    with pytest.raises(moontide.InvalidArgument, match=message):
        alone.moe_forward(tokens, experts, weights, echo)
    assert (alone.moe_forward(*LOCAL, echo)[0][0] == LOCAL[0][0]).all()


def test_arrays_that_make_no_sense_are_refused_before_anybody_waits(alone):
    for wrong in (np.zeros((3, 4), "float32"), np.zeros((2, 4), "float16"), np.zeros((4, 2), "float32").T, b"12345678"):
        with pytest.raises(moontide.InvalidArgument):
            alone.moe_forward(*LOCAL, echo, out=wrong)
        with pytest.raises(moontide.InvalidArgument):
            alone.moe_forward(*LOCAL, echo, packed=wrong)
    with pytest.raises(TypeError, match="not list"):
        alone.send(LOCAL[0].tolist(), LOCAL[1], LOCAL[2])
    for made in (np.zeros((2, 3, 5), "float32"), np.zeros((2, 3, 4), "float64"), None):
        with pytest.raises((moontide.InvalidArgument, TypeError)):
            alone.moe_forward(*LOCAL, lambda packed, rows, made=made: made)
    received = alone.send(*LOCAL).wait()
    for wrong in (2, 1 << 40):
        with pytest.raises(moontide.InvalidArgument, match="there is no expert"):
            received.group(wrong)
        with pytest.raises((moontide.InvalidArgument, OverflowError)):
            received.tokens(wrong)
    alone.abandon()
    for ranks in ([1], [64], [-1]):
        with pytest.raises((moontide.InvalidArgument, OverflowError)):
            alone.leave_behind(ranks)
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(moontide.InvalidArgument, match="timeout"):
            alone.abandon(timeout)
    alone.leave_behind([0])
    assert alone.members == (0,), "nobody leaves himself behind"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"send": "int8"}, "send is"),
        ({"back": "float8"}, "no channel has this shape"),
        ({"back": "bf16"}, "back is"),
        ({"buffers": 3}, "buffers is 1 or 2"),
        ({"returns": "fetch"}, 'returns is "pull" or "push"'),
        ({"top_k": 0}, "no channel has this shape"),
        ({"top_k": 33}, "no channel has this shape"),
        ({"tokens_max": 1 << 23, "experts_per_rank": 65535}, "rows of the grouped layout"),
        ({"hidden": 1 << 60}, "no channel has this shape"),
    ],
)
def test_channels_that_make_no_sense_are_refused(path, settings, message):
    with pytest.raises(moontide.InvalidArgument, match=message):
        Channel.bytes(ranks=1, **(SMALL | settings))
    with World(path, 0, 1, 1 << 20) as world, pytest.raises(moontide.InvalidArgument, match=message):
        Channel(world, **(SMALL | settings))


def test_worlds_that_make_no_sense_are_refused(path):
    for rank, ranks, size in ((1, 1, 4096), (0, 0, 4096), (0, 65, 4096), (0, 1, 0), (0, 1, (1 << 64) - 1)):
        with pytest.raises(moontide.InvalidArgument):
            World(path, rank, ranks, size, timeout=1)
    with pytest.raises(moontide.InvalidArgument, match="too long"):
        World("/tmp/" + "x" * 200, 1, 2, 4096, timeout=0.1)
    with pytest.raises(moontide.DeadlineExceeded, match="rank 0"):
        World(path, 1, 2, 4096, timeout=0.1)
    with pytest.raises(RanksMissing) as missing:
        World(path, 0, 2, 4096, timeout=0.1)
    assert missing.value.ranks == (1,)


def test_ranks_that_take_the_channel_for_different_things_are_told(path):
    def rank(number: int) -> None:
        with World(path, number, 2, 1 << 20, timeout=PATIENCE) as world:
            with pytest.raises(moontide.InvalidArgument, match=f"rank {1 - number} opened the channel with another"):
                Channel(world, **(SMALL | {"top_k": 1 + number}), timeout=PATIENCE)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))


def test_what_is_closed_says_so(path):
    world = World(path, 0, 1, 1 << 20)
    channel = Channel(world, **SMALL)
    sent = channel.send(*LOCAL)
    channel.close()
    channel.close()
    for use in (lambda: channel.send(*LOCAL), lambda: channel.members, channel.abandon, channel.rejoin, sent.wait):
        with pytest.raises(moontide.Closed, match="is closed"):
            use()
    assert repr(channel) == "<moontide.ep.Channel, closed>"
    world.close()
    world.close()
    for use in (world.barrier, world.beat, lambda: world.liveness(0), lambda: Channel(world, **SMALL)):
        with pytest.raises(moontide.Closed, match="the world is closed"):
            use()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_uses_nothing_of_it(path):
    world = World(path, 0, 1, 1 << 20)
    channel = Channel(world, **SMALL)
    sent = channel.send(*LOCAL)
    received = sent.wait_packed()
    rows = received.tokens(0)

    def child() -> None:
        for use in (
            world.barrier,
            world.beat,
            lambda: world.liveness(0),
            lambda: Channel(world, **SMALL),
            lambda: channel.send(*LOCAL),
            lambda: channel.moe_forward(*LOCAL, echo),
            lambda: channel.members,
            lambda: channel.leave_behind([]),
            channel.abandon,
            channel.rejoin,
            sent.wait,
            received.combine,
            lambda: received.scatter(received.packed),
            lambda: received.rows_per_expert,
            lambda: received.tokens(0),
            rows.numpy,
        ):
            with pytest.raises(moontide.Closed, match="forked"):
                use()
        channel.close()
        world.close()

    def child_that_ends() -> None:
        nonlocal world, channel, sent, received, rows
        del world, channel, sent, received, rows

    assert in_child(child) == 0
    assert in_child(child_that_ends) == 0
    received.scatter(received.packed)
    assert (received.combine()[0][0] == LOCAL[0][0]).all()
    assert world.liveness(0) == "alive"
    channel.close()
    world.close()


def test_waiting_can_be_interrupted(path):
    """Control-C is seen while a rank waits, and what it waited for can be gone on with."""
    program = f"""
import signal, threading, os
import numpy as np
from moontide.ep import Channel, World
settings = {SMALL!r}
opened = threading.Barrier(2)
def other():
    world = World({str(path)!r}, 1, 2, 1 << 20)
    channel = Channel(world, **settings)
    opened.wait()
    threading.Event().wait()
threading.Thread(target=other, daemon=True).start()
world = World({str(path)!r}, 0, 2, 1 << 20)
channel = Channel(world, **settings)
opened.wait()
sent = channel.send(np.zeros((0, 4), "float32"), np.zeros((0, 2), "int32"), np.zeros((0, 2), "float32"))
try:
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    sent.wait(60)
except KeyboardInterrupt:
    channel.leave_behind([1])
    print("interrupted", sent.wait(60).sources, flush=True)
os._exit(0)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout == "interrupted (0,)\n", done.stderr
    assert time.monotonic() - began < 50


# ------------------------------------------------------------------------------------------------------- reference


def test_the_reference_rounds_as_others_do():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    numbers = bits.view(np.float32)
    finite = ~np.isnan(numbers)
    ours = reference.to_rows(numbers, "bfloat16")
    with np.errstate(all="ignore"):
        assert (ours == numbers.astype(ml_dtypes.bfloat16).view(np.uint16))[finite].all()
    assert np.isnan(reference.to_numbers(ours, "bfloat16", hidden=6)[~finite]).all()
    random = np.random.default_rng(0)
    rows = random.standard_normal((50, 300)).astype(np.float32)
    packed = reference.to_fp8(rows)
    assert packed.shape == (50, 300 + 3 * 4)
    scales = np.repeat(packed[:, 300:].copy().view(np.float32), 128, axis=1)[:, :300]
    theirs = (rows / scales).astype(ml_dtypes.float8_e4m3fn)
    assert (packed[:, :300] == theirs.view(np.uint8)).all()
    assert (reference.from_fp8(packed, hidden=300) == theirs.astype(np.float32) * scales).all()


def test_a_reference_of_one_token():
    def times(number: int, rows: Any) -> Any:
        return rows * (number + 1)

    tokens, experts, weights = np.ones((1, 3), "float32"), np.array([[0, 3]]), np.array([[0.5, 0.25]], "float32")
    settings: Any = {"experts_per_rank": 2, "hidden": 3, "send": "float32", "back": "float32"}
    assert reference.layer(tokens, experts, weights, times, **settings).tolist() == [[1.5] * 3]
    assert reference.layer(tokens, experts, weights, times, **settings, ranks=[1]).tolist() == [[1.0] * 3]
    assert reference.layer(tokens, experts, weights, times, **settings, ranks=[]).tolist() == [[0.0] * 3]


@pytest.mark.torch
def test_torch_tensors_are_taken_and_filled(path):
    torch = pytest.importorskip("torch")
    with World(path, 0, 1, 1 << 20) as world, Channel(world, **(SMALL | {"send": "bfloat16"})) as channel:
        tokens = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
        out, packed = torch.empty_like(tokens), torch.empty((2, 3, 4), dtype=torch.bfloat16)
        experts, weights = torch.tensor([[0, 1], [1, -1]]), torch.full((2, 2), 0.5)
        results, ranks = channel.moe_forward(tokens, experts, weights, lambda rows, _: rows * 2, out=out, packed=packed)
        assert results is out
        assert out.tolist() == [[0, 2, 4, 6], [4, 5, 6, 7]]
