"""The tracking server as it is deployed: authentication, PostgreSQL, and an S3-compatible store.

Its command line and environment are those of k8s/base/mlflow.yaml; PostgreSQL is the system's, the
store is moto's server. Only addresses and passwords are put in.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from pipeline.config import UnreachableError
from pipeline.runs import RunFolder
from pipeline.tracking import TrackingError
from tests.integration.ray_cluster import free_port
from tests.k8s.objects import K8S
from tests.pipeline.test_tracking import tracker
from tests.pipeline.test_tracking_server import assert_mlflow_has_the_file_once, logged

pytest.importorskip("moto", reason="moto is not installed: the extra `cluster-test`")
pytestmark = [pytest.mark.slow, pytest.mark.integration]

ADMIN, USER = ("admin", "the-admins-password"), ("trainer", "the-trainers-password")
BUCKET = "mlflow"
START_SECONDS = 400.0


class Postgres:
    """A cluster of the system's PostgreSQL in a folder, with MLflow's two databases."""

    def __init__(self, folder: Path) -> None:
        self.bin = _postgres_binaries()
        self.data, self.port = folder / "postgres", free_port()
        # PostgreSQL refuses to run as root.
        self.user = "postgres" if os.geteuid() == 0 else None
        self.data.mkdir()
        if self.user:
            for path in (folder, *folder.parents[:2]):
                path.chmod(0o755)
            os.chown(self.data, pwd.getpwnam(self.user).pw_uid, -1)
        self._run("initdb", "--auth=trust", "--username=mlflow", "--no-sync", "-D", str(self.data))
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c fsync=off"
        options += f" -c unix_socket_directories={self.data}"
        self._run("pg_ctl", "-D", str(self.data), "-w", "-o", options, "-l",
                  str(self.data / "log"), "start")  # fmt: skip
        sql = (K8S / "base" / "postgres.yaml").read_text()
        (databases,) = (
            item["data"]["databases.sql"]
            for item in yaml.safe_load_all(sql)
            if item["kind"] == "ConfigMap"
        )
        for statement in ("CREATE DATABASE mlflow;", databases):
            self._run("psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", "mlflow", "-d",
                      "postgres", "-c", statement)  # fmt: skip

    def uri(self, database: str) -> str:
        return f"postgresql+psycopg://mlflow@127.0.0.1:{self.port}/{database}"

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-m", "immediate", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self.bin / program, *arguments],
            user=self.user,
            capture_output=True,
            text=True,
            cwd="/",
        )
        assert not done.returncode, done.stderr


def _postgres_binaries() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    if not found and not on_path:
        pytest.skip("PostgreSQL's server is not installed: apt-get install postgresql")
    return found[-1].parent if found else Path(str(on_path)).parent


class Server:
    """The deployed server's command, with our addresses and passwords."""

    def __init__(self, folder: Path, postgres: Postgres, s3: str) -> None:
        deployment = next(
            item
            for item in yaml.safe_load_all((K8S / "base" / "mlflow.yaml").read_text())
            if item["kind"] == "Deployment"
        )
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        self.port = free_port()
        self.uri = f"http://localhost:{self.port}"
        auth = folder / "basic_auth.ini"
        auth.write_text(
            f"[mlflow]\ndefault_permission = READ\ndatabase_uri = {postgres.uri('mlflow_auth')}\n"
            f"admin_username = {ADMIN[0]}\nadmin_password = {ADMIN[1]}\n"
            "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        )
        secrets = {
            "backend-store-uri": postgres.uri("mlflow"),
            "artifacts-destination": f"s3://{BUCKET}",
            "flask-secret-key": "signs-cookies",
            "s3-endpoint-url": s3,
            "s3-access-key": "key",
            "s3-secret-key": "secret",
        }
        values = {
            entry["name"]: entry["value"]
            if "value" in entry
            else secrets[entry["valueFrom"]["secretKeyRef"]["key"]]
            for entry in container["env"]
        }
        values |= {"HOME": str(folder), "MLFLOW_AUTH_CONFIG_PATH": str(auth)}
        arguments = [self._ours(argument, values) for argument in container["args"]]
        assert container["command"] == ["mlflow", "server"]
        self._command = [sys.executable, "-m", "mlflow", "server", *arguments]
        self._environment = os.environ | values
        self._folder, self._process = folder, None

    def _ours(self, argument: str, values: dict[str, str]) -> str:
        for name, value in values.items():
            argument = argument.replace(f"$({name})", value)
        argument = argument.replace("--workers=2", "--workers=1").replace("0.0.0.0", "127.0.0.1")
        return argument.replace("5000", str(self.port))

    def start(self) -> None:
        log = (self._folder / "server.log").open("ab")
        self._process = subprocess.Popen(
            self._command, env=self._environment, cwd=self._folder, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while self.status("/health") != 200:
            ended = self._process.poll() is not None
            assert not ended, (self._folder / "server.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "MLflow's server did not start"
            time.sleep(0.5)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def status(self, path: str, who: tuple[str, str] | None = None, **request: Any) -> int:
        """The answer's HTTP status; 0 where there is none."""
        headers = request.pop("headers", {})
        if who:
            headers["Authorization"] = "Basic " + b64encode(":".join(who).encode()).decode()
        asked = urllib.request.Request(f"{self.uri}{path}", headers=headers, **request)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


class Store:
    """An S3 endpoint, and what lies in its bucket."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self._port = free_port()
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port)
        self._server.start()
        self.url = f"http://127.0.0.1:{self._port}"
        self.client().create_bucket(Bucket=BUCKET)

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.url, region_name="us-east-1",
            aws_access_key_id="key", aws_secret_access_key="secret",
        )  # fmt: skip

    def names(self) -> list[str]:
        listed = self.client().list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [item["Key"] for item in listed]

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Store]]:
    folder = tmp_path_factory.mktemp("stack")
    postgres, store = Postgres(folder), Store()
    server = Server(folder, postgres, store.url)
    try:
        server.start()
        created = server.status(
            "/api/2.0/mlflow/users/create",
            ADMIN,
            method="POST",
            headers={"Content-Type": "application/json"},
            data=f'{{"username": "{USER[0]}", "password": "{USER[1]}"}}'.encode(),
        )
        assert created == 200
        yield server, store
    finally:
        server.kill()
        store.stop()
        postgres.stop()


@pytest.fixture
def signed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER[0])
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", USER[1])
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")  # a busy machine answers late


def run_folder(path: Path) -> RunFolder:
    run = RunFolder(path)
    run.path.mkdir()
    run.config.write_text("seed: 0\n")
    run.results.write_text('{"loss": 3.0}')
    return run


def test_two_runs_at_once_and_a_restart_leave_every_metric_once_and_artifacts_in_the_store(
    tmp_path: Path, stack: tuple[Server, Store], signed_in: None
) -> None:
    server, store = stack
    runs = [run_folder(tmp_path / name) for name in ("one", "two")]
    trackers = [tracker(run, uri=server.uri) for run in runs]

    def together(work: Any) -> None:
        errors: list[BaseException] = []

        def guarded(index: int) -> None:
            try:
                work(runs[index], trackers[index])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors

    def first_half(run: RunFolder, of: Any) -> None:
        of.start()  # both find no experiment, and one of them is the first to make it
        logged(run, *range(1, 6))
        of.ship()
        of.log_checkpoint(run.checkpoints / "step-00000005", 5)
        of.log_files(run.results)

    def second_half(run: RunFolder, of: Any) -> None:
        of.finish("FINISHED")

    together(first_half)
    server.kill()
    for run, of in zip(runs, trackers, strict=True):
        logged(run, *range(6, 11))
        with pytest.raises(TrackingError):
            of.ship()
    server.start()
    together(second_half)

    client = MlflowClient(server.uri)
    for run, of in zip(runs, trackers, strict=True):
        assert_mlflow_has_the_file_once(run, of, server.uri)
        assert client.get_run(str(of.mlflow_run_id)).info.status == "FINISHED"
        kept = [key for key in store.names() if str(of.mlflow_run_id) in key]
        assert {Path(key).name for key in kept} == {"config.yaml", "results.json"}
        (model,) = client.search_logged_models(
            [client.get_run(str(of.mlflow_run_id)).info.experiment_id],
            filter_string=f"source_run_id = '{of.mlflow_run_id}'",
        )
        assert model.tags["uri"].endswith("step-00000005")


def test_a_wrong_password_an_unknown_host_and_a_path_that_leaves_are_refused(
    tmp_path: Path, stack: tuple[Server, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, store = stack
    experiments = "/api/2.0/mlflow/experiments/search?max_results=1"
    assert server.status(experiments, USER) == 200
    assert server.status(experiments) == 401
    assert server.status(experiments, (USER[0], "guessed")) == 401
    assert server.status(experiments, USER, headers={"Host": "evil.example"}) == 403
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER[0])
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "guessed")
    with pytest.raises(UnreachableError, match="store"):
        tracker(run_folder(tmp_path / "stranger"), uri=server.uri).start()

    before = store.names()
    base = "/api/2.0/mlflow-artifacts/artifacts"
    for path in ("../escaped", "0/../../escaped", "%2e%2e/escaped", "0/%2e%2e%2fescaped"):
        status = server.status(f"{base}/{path}", USER, method="PUT", data=b"x")
        assert 400 <= status < 500, (path, status)
    assert store.names() == before
