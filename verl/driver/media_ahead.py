"""The images of the tasks that are admitted next are processed while the present step is trained: a synchronous step
admits all of its tasks together, and their requests would wait for the images of each other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from verl.data.source import TaskTable
from verl.driver.task_media import stored_content
from verl.models.pictures import Pictures
from verl.transfer_queue.base import MediaStore

logger = logging.getLogger(__name__)


class MediaAhead:
    """Processes the media of tasks in a thread of its own, for all models of this process that read those of `store`.
    Results are only kept where a request would look for them, so nothing depends on how many are ready.

    store: that of the queue; None: it stores no media"""

    def __init__(self, store: MediaStore | None, tasks: TaskTable) -> None:
        self._store, self._tasks = store, tasks
        self._thread: ThreadPoolExecutor | None = None
        self._ended = threading.Event()

    @property
    def wanted(self) -> bool:
        """True if a model of this process reads media, and tasks have some."""
        return bool(self._readers) and self._tasks.has_images

    @property
    def _readers(self) -> list[Pictures]:
        return [] if self._store is None else [*self._store.readers.values()]

    def begin(self, indices: Sequence[int]) -> None:
        """Process the media of these tasks, in their order, until `end`."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="media-ahead")
        self._ended = threading.Event()
        self._thread.submit(self._read, indices, self._readers, self._ended).add_done_callback(_report)

    def end(self) -> None:
        """Begin the step of these tasks: what is not ready is processed for its request. One may be under way still."""
        self._ended.set()
        for reader in self._readers:
            reader.begin_step()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _read(self, indices: Sequence[int], readers: Sequence[Pictures], ended: threading.Event) -> None:
        for image in (image for index in indices for image in self._tasks.images_at(index)):
            try:
                content = stored_content(image)
                for reader in readers:
                    if ended.is_set() or not reader.read_ahead(content):
                        return
            except ValueError:
                pass  # a file that cannot be read: the attempts of its task report it


def _report(read: Future[None]) -> None:
    if not read.cancelled() and (error := read.exception()) is not None:
        logger.warning("images of the next step are processed when they are asked for: %r", error)
