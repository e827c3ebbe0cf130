"""vLLM's OpenAI-compatible server in its own process, which may be killed and started again."""

import contextlib
import json
import subprocess
import sys
import time

from support.free_port import free_port

NAME = "served"


class VllmServer:
    """Started over a store by `start`.

    Args:
        folder: folder of its log.
        model: the model's folder.
        store: folder of the contexts.
        options: further command-line options.
    """

    def __init__(self, folder, model, store, *options):
        from gracekv.vllm import kv_transfer_config

        port = free_port()
        self.store, self.url, self._log = store, f"http://127.0.0.1:{port}", folder / "log"
        # The module behind `vllm serve`, a command that the CPU build cannot run. Its share of the
        # machine's memory must be free: tests use some of it.
        command = (
            f"-m vllm.entrypoints.openai.api_server --model {model} --served-model-name {NAME}"
            f" --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager"
            " --gpu-memory-utilization 0.5 --kv-transfer-config"
        )
        transfer = json.dumps(kv_transfer_config(store))
        self._command = [sys.executable, *command.split(), transfer, *options]

    def start(self):
        """Start it and wait until it answers."""
        import httpx

        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        for _ in range(600):
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            time.sleep(0.5)
        raise AssertionError(self._log.read_text()[-3000:])

    def memory(self):
        """Resident bytes of all its processes."""
        import psutil

        own = psutil.Process(self._process.pid)
        return sum(one.memory_info().rss for one in [own, *own.children(recursive=True)])

    def kill(self):
        """Kill all its processes at once, as by `kill -9`."""
        import psutil

        # It has no process group of its own, so it ends with the tests when they are stopped.
        for process in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
            process.kill()
        self._process.wait(60)

    def stop(self):
        """Stop it if it runs."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)


@contextlib.contextmanager
def vllm_server(*args):
    """A running `VllmServer`."""
    server = VllmServer(*args)
    server.start()
    try:
        yield server
    finally:
        server.stop()
