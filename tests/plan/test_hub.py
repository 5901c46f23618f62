"""Plans over the Hub, which here is a stub of its HTTP interface."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from manifoldkv import CompressionPlan
from manifoldkv.core.errors import PlanError, RunError
from tests.families import tiny_model
from tests.plans import random_plan

REPO = "somebody/half-a-cache"


class Hub(ThreadingHTTPServer):
    """Repositories in memory, one commit each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *ignored: object) -> None:
        pass

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size)
        self.server.asked.append(f"POST {self.path}")
        if self.path == "/api/repos/create":
            self._json({"url": f"{self.server.address}/{REPO}", "id": REPO})
        elif self.path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            self._json(
                {
                    "files": [
                        {"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths
                    ]
                }
            )
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files[line["value"]["path"]] = content
            url = f"{self.server.address}/{REPO}/commit/{self.server.commit}"
            self._json({"commitUrl": url, "commitOid": self.server.commit, "success": True})
        else:
            self.send_error(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        path = self.path.split("?")[0]
        name = path.split("/resolve/")[-1].split("/", 1)[-1]
        if path.startswith(f"/api/models/{REPO}"):
            siblings = [{"rfilename": file} for file in sorted(self.server.files)]
            tree = [
                {"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for f, c in sorted(self.server.files.items())
            ]
            said = {"id": REPO, "sha": self.server.commit, "siblings": siblings}
            self._json(tree if "/tree/" in path else said)
        elif path.startswith(f"/{REPO}/resolve/") and name in self.server.files:
            self._send(self.server.files[name], "application/octet-stream")
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _json(self, content: object) -> None:
        self._send(json.dumps(content).encode(), "application/json")

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.server.commit)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def plan(tmp_path: Path) -> CompressionPlan:
    found = random_plan(tiny_model("llama"), key_rank=4, value_rank=6)
    found.save(tmp_path / "plan")
    return found


@pytest.fixture
def reached(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub as this process sees it; the environment is read when huggingface_hub is imported."""
    settings = {
        "ENDPOINT": hub.address,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_stub")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()
    yield hub
    close_session()


def test_a_plan_comes_back_as_it_went(reached: Hub, plan: CompressionPlan) -> None:
    assert plan.push_to_hub(REPO).endswith(f"{REPO}/commit/{reached.commit}")
    assert set(reached.files) == {"plan.json", "plan.safetensors", "README.md"}
    card = reached.files["README.md"].decode()
    assert "library_name: manifoldkv" in card
    assert f'CompressionPlan.from_pretrained("{REPO}")' in card
    assert "| 2 | 4 | 6 | 8 |" in card
    reached.files["evil.py"] = b"raise SystemExit"
    assert CompressionPlan.from_pretrained(REPO).digest() == plan.digest()
    assert any("plan.safetensors" in asked for asked in reached.asked)
    assert not any("evil" in asked or "README" in asked for asked in reached.asked)


def test_offline_mode_is_honoured(
    reached: Hub, plan: CompressionPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(RunError, match="cannot push to"):
            plan.push_to_hub(REPO)
        unknown = "neither in the local cache of the Hub nor to be reached there"
        with pytest.raises(PlanError, match=unknown):
            CompressionPlan.from_pretrained(REPO)
        assert reached.asked == []
    plan.push_to_hub(REPO)
    CompressionPlan.from_pretrained(REPO)
    reached.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert CompressionPlan.from_pretrained(REPO).digest() == plan.digest()
    assert reached.asked == []


def test_an_unknown_repository_is_named(reached: Hub) -> None:
    with pytest.raises(PlanError, match="cannot load somebody/nothing: "):
        CompressionPlan.from_pretrained("somebody/nothing")


PROGRAM = """
import sys
from manifoldkv import CompressionPlan
CompressionPlan.load(sys.argv[1]).push_to_hub(sys.argv[2])
print(CompressionPlan.from_pretrained(sys.argv[2]).digest())
"""


def test_the_environment_decides(hub: Hub, plan: CompressionPlan, tmp_path: Path) -> None:
    """Address, token and cache of the Hub are those of the environment."""
    settings = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "hf_stub",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "plan"), REPO],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == plan.digest()
    assert set(hub.files) == {"plan.json", "plan.safetensors", "README.md"}
    assert any((tmp_path / "home").rglob("plan.safetensors"))


def test_a_folder_is_loaded_from_disk(plan: CompressionPlan, tmp_path: Path) -> None:
    assert CompressionPlan.from_pretrained(tmp_path / "plan").digest() == plan.digest()


def test_what_is_neither_folder_nor_repository(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot load a/b/c"):
        CompressionPlan.from_pretrained("a/b/c")


def test_a_card_tells_tokens_that_are_kept(plan: CompressionPlan) -> None:
    assert "tokens uncompressed" not in plan.card(REPO)
    card = replace(plan, sinks=4).card(REPO)
    assert ", the first 4 tokens uncompressed;" in card


def test_a_card_does_not_name_a_folder(plan: CompressionPlan) -> None:
    assert "base_model" not in plan.card(REPO)
