"""Reading s3:// through a real HTTP server: a minimal S3 (one bucket, path style) on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.data.files import expand_files, fingerprint, read_rows

pytestmark = pytest.mark.skipif(find_spec("s3fs") is None, reason="the extra verl[s3] is not installed")
GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_test.jsonl"
DENIED = "secret.jsonl"


class Handler(BaseHTTPRequestHandler):
    """GET (with Range), HEAD and ListObjectsV2 of the bucket `bucket`; requests must be signed."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        if "AWS4-HMAC-SHA256" not in self.headers.get("Authorization", "") or key == DENIED:
            self.answer_error(403, "AccessDenied")
        elif bucket != "bucket":
            self.answer_error(404, "NoSuchBucket")
        elif not key:
            self.list_objects(query)
        elif key not in self.server.objects:
            self.answer_error(404, "NoSuchKey")
        else:
            self.answer_object(self.server.objects[key])

    do_HEAD = do_GET

    def answer_object(self, body: bytes) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        tag = {"ETag": f'"{hashlib.md5(body).hexdigest()}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if not found:
            return self.answer(200, body, tag)
        first, last = int(found[1]), min(int(found[2] or len(body) - 1), len(body) - 1)
        if first >= len(body):
            return self.answer_error(416, "InvalidRange")
        self.server.ranges += 1
        self.answer(206, body[first : last + 1], {**tag, "Content-Range": f"bytes {first}-{last}/{len(body)}"})

    def list_objects(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys = sorted(k for k in self.server.objects if k.startswith(prefix))
        folders = sorted({prefix + k[len(prefix) :].split("/")[0] + "/" for k in keys if "/" in k[len(prefix) :]})
        if delimiter:
            keys = [k for k in keys if "/" not in k[len(prefix) :]]
        else:
            folders = []
        items = "".join(
            f"<Contents><Key>{escape(k)}</Key><Size>{len(self.server.objects[k])}</Size>"
            f"<ETag>&quot;{hashlib.md5(self.server.objects[k]).hexdigest()}&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
            for k in keys
        ) + "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in folders)
        body = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>'
            f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(keys) + len(folders)}</KeyCount><MaxKeys>1000</MaxKeys>"
            f"<IsTruncated>false</IsTruncated>{items}</ListBucketResult>"
        )
        self.answer(200, body.encode(), {"Content-Type": "application/xml"})

    def answer_error(self, status: int, code: str) -> None:
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code} says the test</Message></Error>'
        self.answer(status, body.encode(), {"Content-Type": "application/xml"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body)), "x-amz-request-id": "test"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        self.server.log.append(format % args)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.log: list[str] = []
        self.ranges = 0


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


@pytest.fixture
def s3(shared: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    point_at(f"http://127.0.0.1:{shared.server_port}", monkeypatch)
    shared.objects.clear()
    return shared


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user would: by environment alone."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "dummy",
        "AWS_SECRET_ACCESS_KEY": "dummy",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # a client keeps the endpoint it was made with


def read(*urls: str) -> list[dict[str, object]]:
    return [raw.row for f in expand_files(list(urls)) for raw in read_rows(f)]


def test_jsonl_and_parquet_read_as_they_do_locally(s3: Server, tmp_path: Path) -> None:
    local = read(str(GSM8K))
    pq.write_table(pa.Table.from_pylist(local), tmp_path / "a.parquet", row_group_size=20)
    s3.objects |= {"data/a.jsonl": GSM8K.read_bytes(), "data/a.parquet": (tmp_path / "a.parquet").read_bytes()}
    assert read("s3://bucket/data/a.jsonl") == local
    assert read("s3://bucket/data/a.parquet") == read(str(tmp_path / "a.parquet")) == local
    assert s3.ranges > 0


def test_globs_folders_and_names_in_errors(s3: Server) -> None:
    s3.objects |= {f"data/part-{k}.jsonl": json.dumps({"prompt": str(k)}).encode() for k in (1, 0, 2)}
    s3.objects |= {"data/README.md": b"x", "data/deep/z.jsonl": b"{"}
    for url in ("s3://bucket/data/*.jsonl", "s3://bucket/data", "s3://bucket/data/part-[012].jsonl"):
        assert [r["prompt"] for r in read(url)] == ["0", "1", "2"], url
    with pytest.raises(ValueError, match=r"^s3://bucket/data/deep/z\.jsonl: invalid JSON at column 2"):
        read("s3://bucket/data/deep/*.jsonl")


def test_the_fingerprint_is_the_stores_tag(s3: Server) -> None:
    s3.objects["a.jsonl"] = b'{"prompt": "a"}'
    (file,) = expand_files(["s3://bucket/a.jsonl"])
    s3.log.clear()
    before = fingerprint(file)
    assert not any('"GET /bucket/a.jsonl' in line for line in s3.log), "no download to know the version"
    s3.objects["a.jsonl"] = b'{"prompt": "b"}'
    (file,) = expand_files(["s3://bucket/a.jsonl"])
    assert fingerprint(file) != before


def test_missing_and_denied(s3: Server) -> None:
    for url, message in (
        ("s3://bucket/none.jsonl", "no such file"),
        ("s3://bucket/none/*.jsonl", "no JSONL, Parquet or CSV file matches"),
        (f"s3://bucket/{DENIED}", "permission denied"),
        ("s3://other/a.jsonl", "no such file"),
    ):
        with pytest.raises(ValueError, match=re.escape(url) + ": " + message):
            read(url)


def test_a_refused_connection_names_the_url(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    point_at("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(
        ValueError, match=r"^s3://bucket/a\.jsonl: cannot be read: EndpointConnectionError.*127\.0\.0\.1:9"
    ):
        read("s3://bucket/a.jsonl")


def test_tasks_from_s3_equal_tasks_from_disk(s3: Server, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from verl.config.schema import DataConfig
    from verl.data.source import load_tasks

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: k for k, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    s3.objects["a.jsonl"] = GSM8K.read_bytes()
    cfg = DataConfig(cache_dir=str(tmp_path))
    there, here = (load_tasks([f], tokenizer, cfg) for f in ("s3://bucket/a.jsonl", str(GSM8K)))
    assert [(t.task_id, t.prompt_ids.tolist()) for t in there] == [(t.task_id, t.prompt_ids.tolist()) for t in here]
    assert load_tasks(["s3://bucket/a.jsonl"], tokenizer, cfg).report.from_cache
