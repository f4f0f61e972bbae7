"""A background thread that makes the items of a generator before they are asked for, and ends with who asks.

The thread knows the generator and a small queue, and not the iterator that reads from it: when that is closed, or
garbage, the thread is told to stop and waited for. The same happens when the interpreter exits.

Invariants:
  - at most `most` items wait, and one is in the making;
  - an error of the generator is raised where its item would have been, with its own traceback;
  - when `close` returns, the thread has ended.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any


class Queue:
    """Items between the two threads."""

    def __init__(self, most: int) -> None:
        self.items: deque[Any] = deque()
        self.most = most
        self.changed = threading.Condition()  # reentrant: the garbage collector may close within
        self.closed = self.ended = False
        self.error: BaseException | None = None

    def put(self, item: Any) -> bool:
        """Wait for room and add an item; False when nobody reads any more."""
        with self.changed:
            while len(self.items) >= self.most and not self.closed:
                self.changed.wait()
            self.items.append(item)
            self.changed.notify_all()
            return not self.closed

    def end(self, error: BaseException | None) -> None:
        """There is nothing more, or an error in place of it."""
        with self.changed:
            self.ended, self.error = True, error
            self.changed.notify_all()

    def take(self) -> Any:
        """Wait for an item. Raises StopIteration, or the error, where there is none."""
        with self.changed:
            while not self.items and not self.ended and not self.closed:
                self.changed.wait()
            if self.items and not self.closed:
                self.changed.notify_all()
                return self.items.popleft()
            error, self.error = self.error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self, thread: threading.Thread) -> None:
        """Stop the thread and wait for it."""
        with self.changed:
            self.closed = True
            self.items.clear()
            self.changed.notify_all()
        if thread is not threading.current_thread():  # where the garbage collector runs in it
            thread.join()


class Ahead(Iterator[Any]):
    """The items of a generator, made by a thread. `close` ends it, as does garbage collection."""

    def __init__(self, items: Generator[Any, None, None], most: int) -> None:
        self._queue = Queue(most)
        thread = threading.Thread(target=fill, args=(items, self._queue), name="tdc.data.loader", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, self._queue.close, thread)  # also at exit

    def __next__(self) -> Any:
        return self._queue.take()


def fill(items: Generator[Any, None, None], queue: Queue) -> None:
    """Put items into a queue until they end or nobody reads them."""
    try:
        for item in items:
            if not queue.put(item):
                break
        items.close()
        queue.end(None)
    except BaseException as error:  # whatever it is belongs to who reads
        queue.end(error)


def prefetched(items: Generator[Any, None, None], most: int) -> Generator[Any, None, None]:
    """The same items, up to `most` of them made ahead; without a thread where that is 0."""
    if not most:
        yield from items
        return
    ahead = Ahead(items, most)
    try:
        yield from ahead
    finally:
        ahead.close()
