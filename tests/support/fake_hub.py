"""A Hub in a thread: the few endpoints that packs need, as huggingface.co answers them."""

import base64
import hashlib
import json
import re
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

from fake_server import web_server

TOKEN = "hf_secret"


def blob(content):  # its name in git
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Repository:
    def __init__(self, private=False):
        self.private, self.commits = private, [{".gitattributes": b""}]

    def names(self):
        return [hashlib.sha1(f"{number}".encode()).hexdigest() for number in range(len(self.commits))]

    @property
    def head(self):
        return self.names()[-1]


class Missing(Exception):
    pass


class FakeHub:
    def __init__(self):
        self.repositories, self.requests, self.url = {}, [], ""
        self.sizes = {}  # that it claims of files; None: none

    def put(self, name, files):
        repository = self.repositories.setdefault(name, Repository())
        repository.commits.append({**repository.commits[-1], **files})
        return repository

    def answer(self, method, path, body, token):
        self.requests.append((method, path))
        if method == "POST" and token != f"Bearer {TOKEN}":
            return 401, {"X-Error-Message": "Invalid username or password."}, b""
        for pattern, handle in (
            (r"/api/repos/create", self._create),
            (r"/api/validate-yaml", self._validate),
            (r"/api/models/([^/]+/[^/]+)/preupload/main", self._preupload),
            (r"/api/models/([^/]+/[^/]+)/commit/main", self._commit),
            (r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", self._tree),
            (r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", self._info),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
        ):
            if match := re.fullmatch(pattern, path):
                try:
                    return handle(*match.groups(), body=body)
                except Missing as missing:
                    return 404, {"X-Error-Code": f"{missing}NotFound"}, b""
        raise AssertionError(f"packs need no {method} {path}")

    def _create(self, body):
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repositories:
            return 409, {}, b"{}"
        self.repositories[name] = Repository(asked.get("private") or asked.get("visibility") == "private")
        return self._json({"url": f"{self.url}/{name}"})

    def _validate(self, body):
        return self._json({"errors": [], "warnings": []})

    def _preupload(self, name, body):
        plain = {"uploadMode": "regular", "shouldIgnore": False}
        return self._json({"files": [{"path": file["path"], **plain} for file in json.loads(body)["files"]]})

    def _commit(self, name, body):
        repository = self.repositories[name]
        files = dict(repository.commits[-1])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit") != repository.head:
                return 412, {}, b"{}"
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "deletedFile":
                del files[value["path"]]
        repository.commits.append(files)
        oid = repository.head
        return self._json({"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid})

    def _info(self, name, revision, body):
        files, commit = self._files(name, revision or "main")
        facts = {"id": name, "sha": commit, "private": self.repositories[name].private}
        return self._json(facts | {"siblings": [{"rfilename": file} for file in files]})

    def _tree(self, name, revision, body):
        entries = []
        for file, content in self._files(name, revision)[0].items():
            size = self.sizes.get(file, len(content))
            entries.append({"type": "file", "path": file, "size": size, "oid": blob(content)})
        return self._json(entries)

    def _resolve(self, name, revision, file, body):
        files, commit = self._files(name, revision)
        if file not in files:
            raise Missing("Entry")
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{blob(files[file])}"'}, files[file]

    def _files(self, name, revision):
        if name not in self.repositories:
            raise Missing("Repo")
        repository = self.repositories[name]
        commit = repository.head if revision == "main" else revision
        if commit not in repository.names():
            raise Missing("Revision")
        return repository.commits[repository.names().index(commit)], commit

    def _json(self, document):
        return 200, {"Content-Type": "application/json"}, json.dumps(document).encode()


@contextmanager
def running_hub():
    hub = FakeHub()

    def reply(request, body):
        path = unquote(urlsplit(request.path).path)
        status, headers, content = hub.answer(request.command, path, body, request.headers["Authorization"])
        size = hub.sizes.get(path.rpartition("/")[2], len(content))
        request.answer(status, content, {**headers, "Content-Length": size})

    with web_server(reply) as hub.url:
        yield hub


@contextmanager
def on(hub, cache, monkeypatch, token=TOKEN):
    """Have huggingface_hub, which read its settings when it was imported, ask `hub`."""
    from huggingface_hub import constants

    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setenv("HF_TOKEN", token) if token else patch.delenv("HF_TOKEN", raising=False)
        yield
