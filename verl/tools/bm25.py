"""Search passages by BM25 (Robertson and Zaragoza 2009; k1 = 0.9, b = 0.4, Lucene's idf) in an index of mapped files.

    python -m verl.tools.bm25 passages.jsonl index/        lines {"contents": "title\\ntext"}, or {"title", "text"}

A posting has the score that its term adds to its passage, so that a search only adds. Terms are read in the order of
their highest posting. As soon as the remaining terms together cannot lift another passage above the k best so far, no
further passages are considered, and the remaining terms are looked up for the known passages only. The result equals
that of scoring every passage, in float32.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from verl.errors import Refused

K1, B = 0.9, 0.4
WORD = re.compile(r"\w+")
PARTS = {"terms": np.uint64, "ends": np.int64, "most": np.float32, "passages": np.int32, "worth": np.float32}
PARTS |= {"lines": np.int64}


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def term_id(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def contents(line: bytes, where: str) -> str:
    """Return the text of one line of a corpus. Raises ValueError for another kind of line."""
    try:
        row = json.loads(line)
        return str(row["contents"] if "contents" in row else f"{row['title']}\n{row['text']}")
    except (ValueError, KeyError, TypeError) as e:
        raise Refused(f'{where}: no passage: lines are {{"contents": ...}} or {{"title", "text"}}: {e}') from e


def build(corpus: Path, folder: Path) -> int:
    """Index a JSONL file into a folder, and return the number of passages. Takes 12 bytes of memory per posting."""
    vocabulary: dict[str, int] = {}
    found, where, counts, sizes, lines = array("i"), array("i"), array("H"), array("i"), array("q", [0])
    digest = hashlib.sha256()
    with corpus.open("rb") as file:
        for number, line in enumerate(file):
            digest.update(line)
            present = Counter(words(contents(line, f"{corpus}:{number + 1}")))
            sizes.append(present.total())
            lines.append(lines[-1] + len(line))
            for word, count in present.items():
                found.append(vocabulary.setdefault(word, len(vocabulary)))
                where.append(number)
                counts.append(min(count, 65535))
    if not sizes or not vocabulary:
        raise Refused(f"{corpus}: no passage with a word in it")
    ids = np.array([term_id(word) for word in vocabulary], np.uint64)
    order = np.argsort(ids)
    rank = np.empty(len(ids), np.int32)
    rank[order] = np.arange(len(ids), dtype=np.int32)
    term = rank[np.frombuffer(found, np.int32)]
    by_term = np.argsort(term, kind="stable")  # passages stay in order within a term
    passages, tf = np.frombuffer(where, np.int32)[by_term], np.frombuffer(counts, np.uint16)[by_term].astype(np.float32)
    size, df = np.frombuffer(sizes, np.int32).astype(np.float32), np.bincount(term, minlength=len(ids))
    idf = np.log1p((len(size) - df + 0.5) / (df + 0.5)).astype(np.float32)
    ends = np.concatenate([[0], np.cumsum(df)]).astype(np.int64)
    worth = np.repeat(idf, df) * tf / (tf + (K1 * (1 - B + B * size / size.mean()))[passages])
    made = {"terms": ids[order], "ends": ends, "most": np.maximum.reduceat(worth, ends[:-1]), "passages": passages}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").unlink(missing_ok=True)  # without this file the folder is not an index
    for name, values in (made | {"worth": worth, "lines": np.frombuffer(lines, np.int64)}).items():
        np.save(folder / f"new-{name}.npy", values.astype(PARTS[name]))
        os.replace(folder / f"new-{name}.npy", folder / f"{name}.npy")  # a process that mapped the old file keeps it
    (folder / "corpus.txt").write_text(f"{corpus.resolve()}\n{digest.hexdigest()}")
    return len(size)


class PassageIndex:
    """An index that `build` wrote, and its corpus. content: the hash of the corpus when the index was built."""

    def __init__(self, folder: Path) -> None:
        try:
            parts = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in PARTS}
            path, _, self.content = (folder / "corpus.txt").read_text().rpartition("\n")
            if not path:
                raise FileNotFoundError("it was built by another version")
            corpus = Path(path)
            self._size, self._file = corpus.stat().st_size, corpus.open("rb")
        except OSError as e:
            raise Refused(f"{folder}: no index: {e}. Fix: python -m verl.tools.bm25 CORPUS.jsonl {folder}") from e
        self._terms, self._ends, self._most, self._passages, self._worth, self._lines = parts.values()
        if self._size != self._lines[-1]:
            raise Refused(f"{corpus} has changed since {folder} was built of it: build the index again")

    def search(self, query: str, topk: int) -> list[tuple[int, float]]:
        """Return (passage, score) of the best passages, best first, and of equal ones the earlier passage."""
        ids = np.array([term_id(word) for word in sorted(set(words(query)))], np.uint64)
        at = np.minimum(np.searchsorted(self._terms, ids), len(self._terms) - 1)
        at = at[self._terms[at] == ids]
        at = at[np.argsort(-self._most[at], kind="stable")]
        left = np.append(np.cumsum(self._most[at][::-1])[::-1], 0)
        found, scores = np.zeros(0, np.int32), np.zeros(0, np.float32)
        for k, term in enumerate(at):
            span = slice(int(self._ends[term]), int(self._ends[term + 1]))
            passages, worth = self._passages[span], self._worth[span]
            if len(found) >= topk and np.partition(scores, -topk)[-topk] > left[k]:
                place = np.minimum(np.searchsorted(passages, found), len(passages) - 1)
                scores = scores + np.where(passages[place] == found, worth[place], np.float32(0))
                continue
            both = np.concatenate([found, passages])
            found, inverse = np.unique(both, return_inverse=True)
            scores = np.bincount(inverse, np.concatenate([scores, worth]), len(found)).astype(np.float32)
        best = np.lexsort((found, -scores))[:topk]
        return [(int(found[i]), float(scores[i])) for i in best]

    def passage(self, number: int) -> str:
        start, end = int(self._lines[number]), int(self._lines[number + 1])
        return contents(os.pread(self._file.fileno(), end - start, start), f"passage {number}")  # from any thread


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        print("python -m verl.tools.bm25 CORPUS.jsonl FOLDER", file=sys.stderr)
        return 2
    print(f"{build(Path(argv[0]), Path(argv[1])):,} passages in {argv[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
