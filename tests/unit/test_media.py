"""Media by their hash: content exists while a row of the queue or a recorded step refers to it."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from verl.config.schema import Config
from verl.driver.evaluate import evaluate
from verl.driver.queue_rows import QueueRows
from verl.driver.record import SampleRecorder
from verl.driver.replay import put_recorded, recorded_sample
from verl.driver.task_media import TaskMedia, images_stored
from verl.errors import Refused
from verl.track.samples import read_samples
from verl.transfer_queue import shared
from verl.transfer_queue.base import MediaStore, TransferQueue, copy_media
from verl.transfer_queue.media import FolderMedia, MemoryMedia
from verl.transfer_queue.memory import MemoryQueue
from verl.transfer_queue.options import Shared
from verl.transfer_queue.rows import queued_samples
from verl.types import Medium, Sample, Segment, Task, TaskImage
from verl.workers.waits import Waits

PICTURES = [bytes([n]) * 1000 * (n + 1) for n in range(3)]


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> MediaStore:
    return MemoryMedia() if request.param == "memory" else FolderMedia(tmp_path / "media")


@pytest.fixture(params=["memory", "shared"])
def queue(request: pytest.FixtureRequest) -> Iterator[TransferQueue]:
    yield MemoryQueue() if request.param == "memory" else shared.build(Shared(max_bytes=1 << 22))


def sample(name: str, *names: str, later: str = "") -> Sample:
    segments = (
        Segment(ids=np.array([1, 2]), source="prompt", media=media(*names)),
        Segment(ids=np.array([5]), source="sampled", logprobs=np.zeros(1, np.float32), version=0),
        Segment(ids=np.array([7]), source="env", media=media(later) if later else ()),
    )
    return Sample(sample_id=name, trajectory_id=name, group_id="g", purpose="train", segments=segments)


def media(*names: str) -> tuple[Medium, ...]:
    return tuple(Medium(name, i, 1) for i, name in enumerate(names))


def stored(store: MediaStore | None) -> MediaStore:
    assert store is not None
    return store


def test_content_exists_as_long_as_it_has_an_owner(store: MediaStore) -> None:
    a, b, again = store.put(PICTURES[0], "one"), store.put(PICTURES[1], "one"), store.put(PICTURES[0], "two")
    assert a == again != b and len(store) == 2 and store.get(a) == PICTURES[0]
    store.hold([b, b], "three/with a slash")
    store.drop(["one", "never seen"])
    assert (store.get(a), store.get(b)) == (PICTURES[0], PICTURES[1])
    store.drop(["two", "two"])
    with pytest.raises(ValueError, match=rf"1 media have no content in this store \(never put, or dropped\): {a}"):
        store.get(a)
    store.drop(["three/with a slash"])
    assert len(store) == 0


def test_a_refused_owner_changes_nothing(store: MediaStore) -> None:
    with pytest.raises(ValueError, match="never put"):
        store.hold(["0" * 32], "two")
    a, lost = store.put(PICTURES[0], "one"), "0" * 32
    with pytest.raises(ValueError, match=f"1 media have no content.*{lost}"):
        store.hold([a, lost], "two")
    store.drop(["one"])
    assert len(store) == 0, "the second owner has nothing"


def test_a_reference_is_never_a_path(tmp_path: Path) -> None:
    store = FolderMedia(tmp_path / "media")
    (tmp_path / "secret").write_text("key")
    store.put(b"x", "one")
    for name in ("../../secret", "", "A" * 32, str(tmp_path / "secret")):
        with pytest.raises(ValueError, match="is no reference of media"):
            store.get(name)


def test_damaged_content_is_never_returned(tmp_path: Path) -> None:
    store = pickle.loads(pickle.dumps(FolderMedia(tmp_path)))
    reference = store.put(PICTURES[2], "one")
    (tmp_path / "content" / reference).write_bytes(PICTURES[2][:-1])
    with pytest.raises(ValueError, match="is damaged: its content has another hash"):
        store.get(reference)


def test_many_users_of_one_folder_lose_nothing_that_has_an_owner(tmp_path: Path) -> None:
    """Each thread has an own store: they share the folder alone, as processes do."""
    kept, failures = FolderMedia(tmp_path).put(PICTURES[0], "kept"), list[BaseException]()

    def use(number: int) -> None:
        mine, rng = FolderMedia(tmp_path), np.random.default_rng(number)
        try:
            for turn in range(40):
                owner, picture = f"{number}.{turn}", PICTURES[int(rng.integers(3))]
                reference = mine.put(picture, owner)
                assert mine.get(reference) == picture and mine.get(kept) == PICTURES[0]
                mine.hold([kept, reference], f"{owner} again")
                mine.drop([owner])
                assert mine.get(reference) == picture, "its second owner is there"
                mine.drop([f"{owner} again"])
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures[0]
    store = FolderMedia(tmp_path)
    assert len(store) == 1 and store.get(kept) == PICTURES[0]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".coming")]


def test_rows_keep_the_media_that_they_refer_to(queue: TransferQueue) -> None:
    async def main() -> None:
        store, rows = stored(queue.media), QueueRows(queue, Waits())
        a, b = (store.put(picture, "the loop") for picture in PICTURES[:2])
        refs = await rows.put([sample("one", a), sample("two", a, later=b), sample("text")])
        store.drop(["the loop"])
        assert [s.segments[0].media for s in queued_samples(queue, refs)] == [media(a), media(a), ()]
        assert len(store) == 2 and store.get(b) == PICTURES[1]
        rows.drop(type(refs)(ref for ref in refs if ref.sample_id == "two"))
        assert len(store) == 1 and store.get(a) == PICTURES[0], "the other row refers to it"
        rows.drop_after([], type(refs)(ref for ref in refs if ref.sample_id != "two"), "g", 60.0, pytest.fail)
        await asyncio.gather(*rows.pending)
        assert len(store) == 0 and len(queue) == 0

    asyncio.run(main())


def test_a_row_without_its_media_is_refused(queue: TransferQueue) -> None:
    async def main() -> None:
        store, rows = stored(queue.media), QueueRows(queue, Waits())
        a = store.put(PICTURES[0], "the loop")
        with pytest.raises(ValueError, match="no content in this store"):
            await rows.put([sample("one", a), sample("two", "0" * 32)])
        store.drop(["the loop"])
        assert len(queue) == 0 and len(store) == 0, "neither row is there, nor what it keeps"

    asyncio.run(main())


def test_a_queue_without_a_store_refuses_rows_with_media(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: Any = MemoryQueue()
    queue.media = None
    with pytest.raises(ValueError, match="one has media, and this queue stores none; use queue.engine=shared"):
        asyncio.run(QueueRows(queue, Waits()).put([sample("one", "0" * 32)]))
    asyncio.run(QueueRows(queue, Waits()).put([sample("text")]))


def test_recorded_rows_are_replayed_with_their_media(queue: TransferQueue, tmp_path: Path) -> None:
    async def main() -> None:
        store, rows, kept = stored(queue.media), QueueRows(queue, Waits()), FolderMedia(tmp_path / "media")
        a, b = (store.put(picture, "the loop") for picture in PICTURES[:2])
        refs = await rows.put([sample("one", a), sample("two", a, later=b)])
        store.drop(["the loop"])
        assert SampleRecorder(queue, tmp_path, str, media=kept).record(1, refs, {}) == []
        rows.drop(refs)
        assert len(store) == 0 and (kept.get(a), kept.get(b)) == tuple(PICTURES[:2])

        again = [recorded_sample(row, reads_feedback=False) for row in read_samples(tmp_path, 1)]
        refs = await put_recorded(rows, again, kept)
        found = {s.sample_id: [part.media for part in s.segments] for s in queued_samples(queue, refs)}
        assert found == {"one": [media(a), (), ()], "two": [media(a), (), media(b)]}
        assert (store.get(a), store.get(b)) == tuple(PICTURES[:2])
        rows.drop(refs)
        assert len(store) == 0 and len(kept) == 2, "the record keeps them"

    asyncio.run(main())


def test_media_that_cannot_be_recorded_are_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    queue, kept = MemoryQueue(), FolderMedia(tmp_path / "media")
    a = queue.media.put(PICTURES[0], "the loop")
    monkeypatch.setattr(FolderMedia, "put", full)
    refs = asyncio.run(QueueRows(queue, Waits()).put([sample("one", a)]))
    (line,) = SampleRecorder(queue, tmp_path, str, media=kept).record(3, refs, {})
    assert line == "warning: the media of step 3 are not recorded (No space left on device): it cannot be replayed"
    assert len(read_samples(tmp_path, 3)) == 1


def test_a_copy_reads_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, into = MemoryMedia(), FolderMedia(tmp_path)
    a, b = (source.put(picture, "one") for picture in PICTURES[:2])
    into.put(PICTURES[0], "before")
    read, real = list[str](), source.get
    monkeypatch.setattr(source, "get", lambda name: read.append(name) or real(name))
    copy_media(source, into, [b, a, b], "copy")
    assert read == [b]
    into.drop(["before"])
    assert (into.get(a), into.get(b)) == tuple(PICTURES[:2])


def task_with_images(folder: Path) -> Task:
    images = list[TaskImage]()
    for number, content in enumerate(PICTURES):
        path = folder / f"{number}.png"
        path.write_bytes(content)
        facts = path.stat()
        images.append(TaskImage(str(path), facts.st_size, facts.st_mtime_ns, number, 1))
    return Task(task_id="t", index=0, messages=(), prompt_ids=np.arange(3), images=tuple(images))


def test_a_task_that_is_cancelled_while_its_images_are_stored_leaves_none(
    store: MediaStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that stores them goes on after the wait for it is cancelled."""
    storing, goes_on, put = threading.Event(), threading.Event(), type(store).put

    def slow(self: Any, content: bytes, owner: str) -> str:
        storing.set()
        assert goes_on.wait(20)
        return put(self, content, owner)

    monkeypatch.setattr(type(store), "put", slow)
    task = task_with_images(tmp_path)

    async def cancelled() -> None:
        async def hold() -> None:
            async with TaskMedia(store).held(task, "g1"):
                raise AssertionError("the images are not stored yet")

        running = asyncio.ensure_future(hold())
        await asyncio.to_thread(storing.wait, 20)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled() and len(store) == 0
        goes_on.set()

    asyncio.run(cancelled())  # ends with its threads
    assert len(store) == 0
    monkeypatch.undo()

    async def played() -> int:
        async with TaskMedia(store).held(task, "g1") as seen:
            assert [m.start for m in seen.media] == [0, 1, 2]
            return len(store)

    assert asyncio.run(played()) == 3 and len(store) == 0


def test_rows_whose_store_was_released_leave_no_image_in_it(store: MediaStore, tmp_path: Path) -> None:
    """The thread that makes rows continues after the wait for it is cancelled."""
    a, b, _ = task_with_images(tmp_path).images
    with images_stored(store, "rows") as stored:
        assert stored(a) == stored(a._replace(start=5)) and len(store) == 1
    with pytest.raises(Refused, match="rows are no longer wanted"):
        stored(b)
    assert len(store) == 0


def test_an_evaluation_stores_the_images_of_as_many_tasks_as_the_rollout_answers_at_a_time(tmp_path: Path) -> None:
    store, sizes, texts = MemoryMedia(), list[int](), list[str]()
    one = task_with_images(tmp_path)
    tasks = [replace(one, task_id=str(i), images=(one.images[i % 3],)) for i in range(9)]
    tasks += [replace(tasks[0], task_id="text", images=())] * 9
    waiting, everyone = list[str](), asyncio.Event()

    async def answer(task: Task, spec: Any, sampling: Any) -> Any:
        sizes.append(len({o for owners in store._owners.values() for o in owners}))
        waiting.append(task.task_id)
        if len(waiting) == 9 + 4:
            texts.extend(waiting)
            everyone.set()
        await everyone.wait()
        await asyncio.sleep(0.001)
        return SimpleNamespace(reward=None)

    async def record(*given: Any) -> None:
        assert len(given[1]) == 18

    config = Config()
    config = replace(config, rollout=replace(config.rollout, max_concurrent_sequences=2, replicas=2))
    run: Any = SimpleNamespace(
        config=replace(config, eval=replace(config.eval, samples_per_prompt=1)),
        trajectories=SimpleNamespace(run=answer),
        groups=SimpleNamespace(media=TaskMedia(store), check=lambda: None),
        eval_tasks=tasks,
        reporter=SimpleNamespace(verl_names=False, record_eval=record),
    )
    asyncio.run(asyncio.wait_for(evaluate(run, 1), 30))
    assert len(sizes) == 18 and max(sizes) == 4 and len(store) == 0
    assert texts.count("text") == 9, "rows of text wait for no images"
