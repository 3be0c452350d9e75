"""``moontide.ep``: worlds of processes whose results equal a reference bit by bit, also after ranks are killed; and, in
threads of this process, invalid arguments, exported rows, and ranks that rejoin."""

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
from ep_ranks import RANK_TIMEOUT_S, TIMEOUT_S, STEPS
from test_fork import in_child

import moontide
from moontide.ep import Channel, Excluded, RanksMissing, World, reference

PROGRAM = Path(__file__).with_name("ep_ranks.py")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "python" / "experts.py"
KILLED = -signal.SIGKILL

SMALL: dict[str, Any] = {"tokens_max": 3, "hidden": 4, "top_k": 2, "experts_per_rank": 2, "dispatch_dtype": "float32"}


def run_world(path: Path, scenario: str, ranks: int, seed: int, extra: str = "") -> list[tuple[int, list[str]]]:
    """Runs a world of processes. Returns the exit code and the output of each."""
    words = [[sys.executable, str(PROGRAM), scenario, str(path), str(rank)] for rank in range(ranks)]
    running = [
        subprocess.Popen(
            [*each, str(ranks), str(seed), extra], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for each in words
    ]
    try:
        with ThreadPoolExecutor(ranks) as pool:
            outputs = list(pool.map(lambda process: process.communicate(timeout=100), running))
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, outputs, strict=True):
        assert process.returncode in (0, KILLED), errors
    return [(process.returncode, out.splitlines()) for process, (out, _) in zip(running, outputs, strict=True)]


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a world; short, because paths of sockets are limited."""
    return tmp_path_factory.mktemp("ep") / "world"


def in_threads(path: Path, run: Callable[[World, Channel], Any], ranks: int = 2, **settings: Any) -> list[Any]:
    """Runs the ranks of a world as threads of this process. Returns their results."""
    settings = SMALL | settings

    def rank(number: int) -> Any:
        size = Channel.bytes(ranks=ranks, **{name: settings[name] for name in settings if name != "auto_exclude"})
        with World(path, number, ranks, size, timeout=TIMEOUT_S) as world:
            with Channel(world, **settings, timeout=TIMEOUT_S) as channel:
                return run(world, channel)

    with ThreadPoolExecutor(ranks) as pool:
        return [each.result(100) for each in [pool.submit(rank, number) for number in range(ranks)]]


ONE = (np.full((1, 4), 3, "float32"), np.array([[0, 3]]), np.array([[0.5, 0.25]], "float32"))
NONE = (np.zeros((0, 4), "float32"), np.zeros((0, 2), "int32"), np.zeros((0, 2), "float32"))


def echo(packed: Any, _rows: Any) -> Any:
    """Experts that return their input."""
    return packed


def step(channel: Channel) -> None:
    """Runs a step with one token to both ranks."""
    results, ranks = channel.moe_forward(*ONE, echo, timeout=TIMEOUT_S)
    assert ranks == (0, 1)
    assert (results == 2.25).all()


# ------------------------------------------------------------------------------------------------------ processes


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_match_reference_and_are_reproducible(path, seed, ranks):
    runs = [run_world(path.with_name(f"run-{run}"), "sweep", ranks, seed) for run in range(2)]
    assert all(code == 0 and len(lines) == 1 for run in runs for code, lines in run)
    assert runs[0] == runs[1], "results are bit-identical"


def test_eight_ranks_match_reference(path, seed):
    assert [code for code, _ in run_world(path, "sweep", 8, seed)] == [0] * 8


def test_surviving_ranks_continue_after_ranks_are_killed(path, seed):
    """One rank is killed before its dispatch, one after it. Both are reported within the timeout, and no other rank
    is."""
    ended = run_world(path, "kills", 4, seed, "3@4:idle,1@8:dispatched")
    assert [code for code, _ in ended] == [0, KILLED, 0, KILLED]
    lines = {rank: lines for rank, (code, lines) in enumerate(ended) if code == 0}
    for output in lines.values():
        assert [line for line in output if not line.startswith("late")] == ["lost 4 3", "lost 8 1", "done 0 2"]
    # One rank reports the missing one, perhaps the one that is killed later. Ranks that started their wait later may
    # find that it is already excluded.
    late = [line.split()[1:] for _, output in ended for line in output if line.startswith("late")]
    assert {rank for rank, _ in late} == {"1", "3"}
    assert all(RANK_TIMEOUT_S * 0.9 < float(seconds) < RANK_TIMEOUT_S + 5 for _, seconds in late), late
    assert STEPS > 8


def test_experts_example_matches_reference():
    if not EXAMPLE.is_file():
        pytest.skip("the examples are not available")
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "bit by bit" in done.stdout


# ----------------------------------------------------------------------------------------------- worlds and members


def test_world_reports_members_and_liveness(path):
    def rank(world: World, channel: Channel) -> None:
        assert world.barrier(TIMEOUT_S) == (0, 1)
        assert (world.ranks, world.generation, world.bytes % 4096) == (2, 1, 0)
        assert channel.members == (0, 1)
        assert channel.rank == world.rank
        assert [world.liveness(rank, ttl=1000) for rank in (0, 1)] == ["alive", "alive"]
        world.heartbeat()
        step(channel)

    in_threads(path, rank)


def test_timeout_names_missing_rank_and_wait_can_continue(path):
    def rank(world: World, channel: Channel) -> None:
        if channel.rank == 1:
            world.barrier(TIMEOUT_S)
            return step(channel)
        dispatching = channel.start_dispatch(*ONE)
        for _ in range(2):
            with pytest.raises(RanksMissing, match="timed out waiting for rank 1; wait again, or exclude") as late:
                dispatching.wait(0.05)
            assert late.value.ranks == (1,)
            assert isinstance(late.value, TimeoutError) and late.value.retryable
            assert pickle.loads(pickle.dumps(late.value)).ranks == (1,)
        world.barrier(TIMEOUT_S)
        dispatched = dispatching.wait_packed(timeout=TIMEOUT_S)
        dispatched.scatter(dispatched.packed)
        results, _ = dispatched.combine(timeout=TIMEOUT_S)
        assert (results == 2.25).all()

    in_threads(path, rank)


def test_excluded_rank_gets_excluded_error_and_rejoins(path):
    def rank(world: World, channel: Channel) -> None:
        if channel.rank == 0:
            with pytest.raises(RanksMissing):
                channel.moe_forward(*ONE, echo, timeout=0.05)
            with pytest.raises(moontide.InvalidArgument, match="abort it first"):
                channel.start_dispatch(*ONE)
            channel.exclude([1])
            channel.abort_step(TIMEOUT_S)
            results, ranks = channel.moe_forward(*ONE, echo, timeout=TIMEOUT_S)
            assert ranks == (0,) and (results == 1.5).all(), "experts of the excluded rank do not count"
            world.barrier(TIMEOUT_S)
            world.barrier(TIMEOUT_S)
            while channel.members != (0, 1):
                channel.moe_forward(*NONE, echo, timeout=TIMEOUT_S)
        else:
            world.barrier(TIMEOUT_S)
            with pytest.raises(Excluded, match="may rejoin"):
                channel.start_dispatch(*ONE)
            with pytest.raises(Excluded):
                channel.members  # noqa: B018
            with pytest.raises(RanksMissing):
                channel.rejoin(0)
            with pytest.raises(Excluded):
                channel.start_dispatch(*ONE)
            world.barrier(TIMEOUT_S)
            channel.rejoin(TIMEOUT_S)
        step(channel)

    in_threads(path, rank)


def test_auto_exclude_drops_late_ranks(path):
    def rank(world: World, channel: Channel) -> None:
        if channel.rank == 0:
            results, ranks = channel.moe_forward(*ONE, echo, timeout=0.05)
            assert ranks == (0,) and (results == 1.5).all()
        world.barrier(TIMEOUT_S)

    in_threads(path, rank, auto_exclude=True)


def test_restarted_rank_joins_with_new_generation(path):
    size = Channel.bytes(ranks=2, **SMALL)
    left, missed = threading.Event(), threading.Event()

    def first() -> None:
        with World(path, 0, 2, size, timeout=TIMEOUT_S) as world, Channel(world, **SMALL, timeout=TIMEOUT_S) as channel:
            step(channel)
            assert left.wait(TIMEOUT_S)
            assert world.liveness(1) == "absent"
            with pytest.raises(RanksMissing):
                channel.moe_forward(*NONE, echo, timeout=0.05)
            channel.exclude([1])
            channel.abort_step(TIMEOUT_S)
            missed.set()
            while channel.members != (0, 1):
                channel.moe_forward(*NONE, echo, timeout=TIMEOUT_S)
            step(channel)

    def second() -> None:
        with World(path, 1, 2, size, timeout=TIMEOUT_S) as world, Channel(world, **SMALL, timeout=TIMEOUT_S) as channel:
            step(channel)
        left.set()
        assert missed.wait(TIMEOUT_S)
        with World(path, 1, 2, size, timeout=TIMEOUT_S) as world:
            assert world.generation == 2
            with Channel(world, **SMALL, timeout=TIMEOUT_S) as channel:
                step(channel)

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(first), pool.submit(second)]:
            each.result(100)


def test_world_holds_several_non_overlapping_channels(path):
    size = Channel.bytes(ranks=1, **SMALL)
    with World(path, 0, 1, 3 * size) as world:
        channels = [Channel(world, **SMALL), Channel(world, **SMALL)]
        with pytest.raises(moontide.InvalidArgument, match="was opened within"):
            Channel(world, **SMALL, offset=64)
        channels.append(Channel(world, **SMALL, offset=2 * size))
        with pytest.raises(moontide.InvalidArgument, match="does not fit"):
            Channel(world, **(SMALL | {"tokens_max": 100000}))
        dispatching = [channel.start_dispatch(ONE[0], np.array([[0, 1]]), ONE[2]) for channel in channels]
        for each in reversed(dispatching):
            dispatched = each.wait_packed()
            dispatched.scatter(dispatched.packed)
            assert (dispatched.combine()[0] == 2.25).all()
        channels[0].close()
        with pytest.raises(moontide.InvalidArgument, match="was opened within"):
            Channel(world, **SMALL, offset=0)


# ----------------------------------------------------------------------------------------------- world of one rank


@pytest.fixture
def alone(path: Path) -> Iterator[Channel]:
    with World(path, 0, 1, 1 << 20) as world, Channel(world, **SMALL) as channel:
        yield channel


LOCAL = (np.arange(8, dtype="float32").reshape(2, 4), np.array([[0, 1], [1, -1]]), np.full((2, 2), 0.5, "float32"))


def test_finished_step_is_closed(alone):
    dispatching = alone.start_dispatch(*LOCAL)
    dispatched = dispatching.wait_packed()
    with pytest.raises(moontide.InvalidArgument, match="was waited for already"):
        dispatching.wait()
    with pytest.raises(moontide.InvalidArgument, match="call scatter"):
        dispatched.combine()
    rows = dispatched.tokens(0)
    assert repr(rows) == "<moontide.ep.TokenRows of rank 0 [2, 4]>"
    dispatched.scatter(dispatched.packed)
    results, ranks = dispatched.combine()
    assert results.tolist() == [[0, 1, 2, 3], [2, 2.5, 3, 3.5]] and ranks == (0,)
    for use in (
        lambda: dispatched.combine(),
        lambda: dispatched.scatter(dispatched.packed),
        lambda: dispatched.rows_per_expert,
        lambda: dispatched.group(0),
        lambda: dispatched.tokens(0),
        lambda: dispatching.wait(),
    ):
        with pytest.raises(moontide.Closed, match="the step is over"):
            use()
    for use in (memoryview, np.asarray, np.array, lambda rows: rows.numpy()):
        with pytest.raises(BufferError, match="the step is over"):
            use(rows)


def test_exported_zero_copy_rows_block_end_of_step(alone):
    tokens = LOCAL[0].copy()
    dispatched = alone.start_dispatch(tokens, *LOCAL[1:]).wait()
    assert dispatched.packed is None
    array = dispatched.tokens(0).numpy()
    assert not array.flags.writeable and np.shares_memory(array, tokens)
    dispatched.scatter(np.zeros((2, 3, 4), "float32"))
    for end in (dispatched.combine, alone.abort_step, alone.rejoin, alone.close):
        with pytest.raises(BufferError, match="lent to 1 arrays; drop them"):
            end()
    assert (array == tokens).all()
    with pytest.raises(TypeError, match="read-only"):
        memoryview(dispatched.tokens(0))[0, 0] = 1
    del array
    assert (dispatched.combine()[0] == 0).all()


def test_rows_of_other_ranks_are_strided(path):
    def rank(_world: World, channel: Channel) -> None:
        tokens = np.full((2, 4), channel.rank + 1, "float32")
        routes = np.array([[0, 2], [1, 3]])
        dispatched = channel.start_dispatch(tokens, routes, np.ones((2, 2), "float32")).wait(TIMEOUT_S)
        other = dispatched.tokens(1 - channel.rank)
        assert len(other) == 2 and other.shape == (2, 4) and other.source == 1 - channel.rank
        assert other.numpy().strides == (64, 4)
        assert (other.numpy() == 2 - channel.rank).all()
        with pytest.raises(BufferError, match="gaps"):
            hashlib.sha256(other)
        dispatched.scatter(np.ones((2, 6, 4), "float32"))
        assert (dispatched.combine(timeout=TIMEOUT_S)[0] == 2).all()

    in_threads(path, rank)


def test_output_may_alias_tokens(alone):
    tokens = LOCAL[0].copy()
    results, _ = alone.moe_forward(tokens, *LOCAL[1:], lambda packed, rows: packed * 2, out=tokens)
    assert results is tokens
    assert tokens.tolist() == [[0, 2, 4, 6], [4, 5, 6, 7]]


def test_packed_rows_must_not_alias_tokens(path):
    with World(path, 0, 1, 1 << 20) as world:
        channel = Channel(world, **(SMALL | {"tokens_max": 1, "experts_per_rank": 1, "top_k": 1}))
        tokens = np.ones((1, 4), "float32")
        dispatching = channel.start_dispatch(tokens, np.array([[0]]), np.ones((1, 1), "float32"))
        with pytest.raises(moontide.InvalidArgument, match="overlaps"):
            dispatching.wait_packed(tokens.reshape(1, 1, 4))
        assert dispatching.wait_packed().packed.tolist() == [[[1] * 4]]
        channel.abort_step()
        channel.close()


def test_exception_in_experts_aborts_step(path):
    def rank(_world: World, channel: Channel) -> None:
        def fails(_packed: Any, _rows: Any) -> Any:
            raise RuntimeError("no such weights")

        if channel.rank == 0:
            with pytest.raises(RuntimeError, match="no such weights"):
                channel.moe_forward(*ONE, fails, timeout=TIMEOUT_S)
        else:
            results, ranks = channel.moe_forward(*ONE, echo, timeout=TIMEOUT_S)
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
def test_invalid_tokens_experts_or_weights_are_rejected(alone, tokens, experts, weights, message):
    with pytest.raises(moontide.InvalidArgument, match=message):
        alone.start_dispatch(tokens, experts, weights)
    with pytest.raises(moontide.InvalidArgument, match=message):
        alone.moe_forward(tokens, experts, weights, echo)
    assert (alone.moe_forward(*LOCAL, echo)[0][0] == LOCAL[0][0]).all()


def test_invalid_arrays_ranks_and_timeouts_are_rejected(alone):
    for wrong in (np.zeros((3, 4), "float32"), np.zeros((2, 4), "float16"), np.zeros((4, 2), "float32").T, b"12345678"):
        with pytest.raises(moontide.InvalidArgument):
            alone.moe_forward(*LOCAL, echo, out=wrong)
        with pytest.raises(moontide.InvalidArgument):
            alone.moe_forward(*LOCAL, echo, packed=wrong)
    with pytest.raises(TypeError, match="not list"):
        alone.start_dispatch(LOCAL[0].tolist(), LOCAL[1], LOCAL[2])
    for made in (np.zeros((2, 3, 5), "float32"), np.zeros((2, 3, 4), "float64"), None):
        with pytest.raises((moontide.InvalidArgument, TypeError)):
            alone.moe_forward(*LOCAL, lambda packed, rows, made=made: made)
    dispatched = alone.start_dispatch(*LOCAL).wait()
    for wrong in (2, 1 << 40):
        with pytest.raises(moontide.InvalidArgument, match="there is no expert"):
            dispatched.group(wrong)
        with pytest.raises((moontide.InvalidArgument, OverflowError)):
            dispatched.tokens(wrong)
    alone.abort_step()
    for ranks in ([1], [64], [-1]):
        with pytest.raises((moontide.InvalidArgument, OverflowError)):
            alone.exclude(ranks)
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(moontide.InvalidArgument, match="timeout"):
            alone.abort_step(timeout)
    alone.exclude([0])
    assert alone.members == (0,), "a rank cannot exclude itself"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dispatch_dtype": "int8"}, "dispatch_dtype must be"),
        ({"combine_dtype": "float8"}, "invalid channel config"),
        ({"combine_dtype": "bf16"}, "combine_dtype must be"),
        ({"buffers": 3}, "buffers must be 1 or 2"),
        ({"combine_mode": "fetch"}, 'combine_mode must be "pull" or "push"'),
        ({"top_k": 0}, "invalid channel config"),
        ({"top_k": 33}, "invalid channel config"),
        ({"tokens_max": 1 << 23, "experts_per_rank": 65535}, "rows of the grouped layout"),
        ({"hidden": 1 << 60}, "invalid channel config"),
    ],
)
def test_invalid_channel_settings_are_rejected(path, settings, message):
    with pytest.raises(moontide.InvalidArgument, match=message):
        Channel.bytes(ranks=1, **(SMALL | settings))
    with World(path, 0, 1, 1 << 20) as world, pytest.raises(moontide.InvalidArgument, match=message):
        Channel(world, **(SMALL | settings))


def test_invalid_world_settings_are_rejected(path):
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


def test_channel_settings_that_differ_between_ranks_are_rejected(path):
    def rank(number: int) -> None:
        with World(path, number, 2, 1 << 20, timeout=TIMEOUT_S) as world:
            with pytest.raises(moontide.InvalidArgument, match=f"rank {1 - number} opened the channel with another"):
                Channel(world, **(SMALL | {"top_k": 1 + number}), timeout=TIMEOUT_S)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))


def test_calls_on_closed_channel_or_world_raise_closed(path):
    world = World(path, 0, 1, 1 << 20)
    channel = Channel(world, **SMALL)
    dispatching = channel.start_dispatch(*LOCAL)
    channel.close()
    channel.close()
    for use in (
        lambda: channel.start_dispatch(*LOCAL),
        lambda: channel.members,
        channel.abort_step,
        channel.rejoin,
        dispatching.wait,
    ):
        with pytest.raises(moontide.Closed, match="is closed"):
            use()
    assert repr(channel) == "<moontide.ep.Channel, closed>"
    world.close()
    world.close()
    for use in (world.barrier, world.heartbeat, lambda: world.liveness(0), lambda: Channel(world, **SMALL)):
        with pytest.raises(moontide.Closed, match="the world is closed"):
            use()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_forked_child_cannot_use_world_or_channel(path):
    world = World(path, 0, 1, 1 << 20)
    channel = Channel(world, **SMALL)
    dispatching = channel.start_dispatch(*LOCAL)
    dispatched = dispatching.wait_packed()
    rows = dispatched.tokens(0)

    def child() -> None:
        for use in (
            world.barrier,
            world.heartbeat,
            lambda: world.liveness(0),
            lambda: Channel(world, **SMALL),
            lambda: channel.start_dispatch(*LOCAL),
            lambda: channel.moe_forward(*LOCAL, echo),
            lambda: channel.members,
            lambda: channel.exclude([]),
            channel.abort_step,
            channel.rejoin,
            dispatching.wait,
            dispatched.combine,
            lambda: dispatched.scatter(dispatched.packed),
            lambda: dispatched.rows_per_expert,
            lambda: dispatched.tokens(0),
            rows.numpy,
        ):
            with pytest.raises(moontide.Closed, match="forked"):
                use()
        channel.close()
        world.close()

    def child_that_ends() -> None:
        nonlocal world, channel, dispatching, dispatched, rows
        del world, channel, dispatching, dispatched, rows

    assert in_child(child) == 0
    assert in_child(child_that_ends) == 0
    dispatched.scatter(dispatched.packed)
    assert (dispatched.combine()[0][0] == LOCAL[0][0]).all()
    assert world.liveness(0) == "alive"
    channel.close()
    world.close()


def test_wait_is_interrupted_by_sigint_and_can_continue(path):
    """Ctrl-C interrupts the wait of a rank, and the wait can be continued."""
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
tokens, experts = np.zeros((0, 4), "float32"), np.zeros((0, 2), "int32")
dispatching = channel.start_dispatch(tokens, experts, np.zeros((0, 2), "float32"))
try:
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    dispatching.wait(60)
except KeyboardInterrupt:
    channel.exclude([1])
    print("interrupted", dispatching.wait(60).sources, flush=True)
os._exit(0)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout == "interrupted (0,)\n", done.stderr
    assert time.monotonic() - began < 50


# ------------------------------------------------------------------------------------------------------- reference


def test_reference_rounding_matches_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    low_halves = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | low_halves
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


def test_reference_of_one_token_counts_only_given_ranks():
    def times(number: int, rows: Any) -> Any:
        return rows * (number + 1)

    tokens, experts, weights = np.ones((1, 3), "float32"), np.array([[0, 3]]), np.array([[0.5, 0.25]], "float32")
    settings: Any = {"experts_per_rank": 2, "hidden": 3, "dispatch_dtype": "float32", "combine_dtype": "float32"}
    assert reference.layer(tokens, experts, weights, times, **settings).tolist() == [[1.5] * 3]
    assert reference.layer(tokens, experts, weights, times, **settings, ranks=[1]).tolist() == [[1.0] * 3]
    assert reference.layer(tokens, experts, weights, times, **settings, ranks=[]).tolist() == [[0.0] * 3]


@pytest.mark.torch
def test_torch_tensors_are_accepted_as_input_and_output(path):
    torch = pytest.importorskip("torch")
    with World(path, 0, 1, 1 << 20) as world, Channel(world, **(SMALL | {"dispatch_dtype": "bfloat16"})) as channel:
        tokens = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
        out, packed = torch.empty_like(tokens), torch.empty((2, 3, 4), dtype=torch.bfloat16)
        experts, weights = torch.tensor([[0, 1], [1, -1]]), torch.full((2, 2), 0.5)
        results, ranks = channel.moe_forward(tokens, experts, weights, lambda rows, _: rows * 2, out=out, packed=packed)
        assert results is out
        assert out.tolist() == [[0, 2, 4, 6], [4, 5, 6, 7]]
