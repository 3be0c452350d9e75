"""How long a cached prefix is: asked in the background, for schedulers that must not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .door import LOG, Door

#: How many keys are asked for in one call at most.
_BATCH_KEYS = 8192


@dataclass
class Counts:
    """What was asked for, and what came of it."""

    asked: int = 0
    answered: int = 0
    #: Not answered in time, or not asked at all because the store is away.
    given_up: int = 0
    blocks_asked: int = 0
    blocks_found: int = 0
    seconds: float = 0.0


@dataclass
class _Question:
    keys: Callable[[], Sequence[str]]
    blocks: int
    asked: float = field(default_factory=time.monotonic)
    found: int | None = None
    answered: float = 0.0


class Lookups:
    """Prefixes by name. ``ask`` returns at once; what it does not know yet it knows a little later.

    One thread asks for everything that waits in one call. A store that is slow or away costs a request ``patience``
    seconds once, and nothing while it stays away.
    """

    def __init__(self, door: Door, patience: float = 0.25, lasts: float = 2.0, prefetch: bool = True) -> None:
        self._door = door
        self._patience = patience
        self._lasts = lasts
        self._prefetch = prefetch
        self._questions: dict[str, _Question] = {}
        self._waiting: list[_Question] = []
        self._changed = threading.Condition()
        self._ends = False
        self.counts = Counts()
        self._thread = threading.Thread(target=self._work, name="moontide-lookups", daemon=True)
        self._thread.start()

    def ask(self, name: str, blocks: int, keys: Callable[[], Sequence[str]]) -> int | None:
        """How many of the blocks there are, from the first on without a gap; nothing if that is not known yet.

        ``keys`` makes their keys, the same number for each block; it is called in the background.
        """
        if blocks < 1:
            return 0
        now = time.monotonic()
        question = self._questions.get(name)
        if question is not None and question.blocks == blocks:
            if question.found is not None and now - question.answered < self._lasts:
                return question.found
            if question.found is None and now - question.asked < self._patience:
                return None
            if question.found is None:
                self.counts.given_up += 1
                question.found, question.answered = 0, now
                return 0
        self.counts.asked += 1
        if not self._door.is_open:
            self.counts.given_up += 1
            return 0
        question = _Question(keys, blocks)
        self._questions[name] = question
        with self._changed:
            self._waiting.append(question)
            self._changed.notify()
        return None

    def forget(self, name: str) -> None:
        """Nobody will ask for it again."""
        self._questions.pop(name, None)

    def forget_all(self) -> None:
        """Whoever asks from now on is not answered from memory."""
        self._questions.clear()

    def close(self) -> None:
        """Ends the thread, when what it has asked is answered."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join(10)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ends:
                    self._changed.wait()
                if self._ends:
                    return
                questions, self._waiting = self._waiting, []
            try:
                self._answer(questions)
            except Exception as error:  # whatever it is, the thread must go on, and the engine compute
                LOG.exception("a lookup failed")
                self._door.failed(str(error))
                self._settle([(question, 0) for question in questions])

    def _answer(self, questions: list[_Question]) -> None:
        began = time.monotonic()
        store = self._door.store()
        if store is None:
            self._settle([(question, 0) for question in questions])
            return
        asked = [list(question.keys()) for question in questions]
        keys = [key for some in asked for key in some]
        codes: list[int] = []
        for start in range(0, len(keys), _BATCH_KEYS):
            codes += store._exists_codes(keys[start : start + _BATCH_KEYS])
        failed = next((code for code in codes if code < 0), None)
        if failed is not None:
            self._door.failed(f"a lookup gave {failed}")
        else:
            self._door.worked()
        settled, at = [], 0
        for question, own in zip(questions, asked, strict=True):
            each = len(own) // question.blocks
            there = codes[at : at + len(own)]
            missing = next((i for i, code in enumerate(there) if code != 1), len(there))
            settled.append((question, missing // each))
            at += len(own)
        self.counts.seconds += time.monotonic() - began
        self._settle(settled)
        if self._prefetch:
            wanted = [
                key
                for (question, found), own in zip(settled, asked, strict=True)
                for key in own[: found * (len(own) // question.blocks)]
            ]
            for start in range(0, len(wanted), _BATCH_KEYS):
                store.prefetch(wanted[start : start + _BATCH_KEYS])

    def _settle(self, settled: list[tuple[_Question, int]]) -> None:
        now = time.monotonic()
        for question, found in settled:
            self.counts.answered += 1
            self.counts.blocks_asked += question.blocks
            self.counts.blocks_found += found
            question.answered = now
            question.found = found
