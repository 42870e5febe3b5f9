"""Checks of this machine before it is trusted with a run. Every finding that is not ok names its fix."""

import os
import platform
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from kvm_dist.config import RunConfig
from kvm_dist.exit_codes import ExitCode
from kvm_dist.load import load_config
from launch.console import table_console
from launch.doctor_data import check_data
from launch.doctor_devices import check_devices
from launch.doctor_engine import check_engine
from launch.doctor_versions import REQUIREMENTS, check_pairs, check_tested, check_versions
from launch.finding import Finding
from parallel.placement import Placement, threads_from_environment, world_from_environment

TRACKING_TIMEOUT_SECONDS = 5.0
LEAST_FREE_BYTES = 10 << 30
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def run_doctor(config_path: Path | None, overrides: Sequence[str]) -> int:
    """Print every finding. Returns 0, or 70 when a check failed."""
    config = load_config(config_path, overrides).config if config_path else RunConfig()
    placement = world_from_environment(os.environ)
    checks = [*CHECKS, *(CHECKS_OF_A_RUN if config_path else ())]
    findings = [finding for check in checks for finding in check(config)]
    silent = placement.rank != 0 and not any(finding.level == "fail" for finding in findings)
    if placement.size > 1:
        findings += check_ranks(config, placement)
    failed = any(finding.level == "fail" for finding in findings)
    if silent:
        return int(ExitCode.CRASH) if failed else 0  # rank 0 tells of what concerns all
    table = Table()
    for title in ("check", "", "found", "fix"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        style = STYLES[finding.level]
        table.add_row(
            finding.what, f"[{style}]{finding.level}[/]", escape(finding.found), escape(finding.fix)
        )
    table_console().print(table)
    return int(ExitCode.CRASH) if failed else 0


def check_ranks(config: RunConfig, placement: Placement) -> Iterator[Finding]:
    """As one rank of several: whether all have the same versions, code and variables; how fast they talk."""
    from launch.doctor_ranks import compare_ranks

    try:
        found = compare_ranks(config, placement, list(REQUIREMENTS))
    except (ConnectionError, ValueError) as error:
        yield Finding("ranks", "fail", str(error), "mend the network or the launch; both are named")
        return
    for what, said, fix in found:
        yield Finding(what, "fail" if fix else "ok", said, fix)


def check_python(config: RunConfig) -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def check_threads(config: RunConfig) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    ranks = config.parallel.world_size
    try:
        given = config.parallel.threads_per_rank or threads_from_environment(os.environ)
    except ValueError as error:
        yield Finding("threads", "fail", str(error), "see there")
        return
    threads = given or max(1, cores // ranks)
    found = f"{ranks} ranks x {threads} threads on {cores} cores"
    if ranks * threads > cores:
        fix = "fewer ranks, or parallel.threads_per_rank or OMP_NUM_THREADS of cores / ranks"
        yield Finding("threads", "warn", found, fix)
    else:
        yield Finding("threads", "ok", found)


def check_run_root(config: RunConfig) -> Iterator[Finding]:
    try:
        config.run_root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.run_root) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        fix = "make it writable, or choose another place with run_root=PATH"
        yield Finding("run root", "fail", f"{config.run_root}: {error.strerror or error}", fix)
        return
    yield Finding("run root", "ok", f"{config.run_root.resolve()} is writable")
    free = shutil.disk_usage(config.run_root).free
    found = f"{free / 1e9:,.1f} GB free at {config.run_root.resolve()}"
    if free < LEAST_FREE_BYTES:
        fix = "make room; `kvm-dist plan CONFIG` says how large a checkpoint is"
        yield Finding("disk", "warn", found, fix)
    else:
        yield Finding("disk", "ok", found)


def check_tracking(config: RunConfig) -> Iterator[Finding]:
    uri = config.tracking_uri
    if not config.tracking.enabled:
        yield Finding("tracking", "ok", "switched off (tracking.enabled)")
    elif not uri.startswith(("http://", "https://")):
        yield Finding("tracking", "ok", f"{uri.partition('?')[0]} (no server needed)")
    else:
        yield _reach(uri)


def _reach(uri: str) -> Finding:
    fix = "start the server or mend tracking.uri; training itself goes on without it"
    try:
        address = uri.rstrip("/") + "/health"
        with urllib.request.urlopen(address, timeout=TRACKING_TIMEOUT_SECONDS) as answer:
            return Finding("tracking", "ok", f"{uri} answers ({answer.status})")
    except urllib.error.HTTPError as error:
        return Finding("tracking", "warn", f"{uri} answers {error.code}", fix)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return Finding("tracking", "warn", f"{uri}: {reason}", fix)


CHECKS: tuple[Callable[[RunConfig], Iterator[Finding]], ...] = (
    check_python,
    check_versions,
    check_pairs,
    check_tested,
    check_devices,
    check_threads,
    check_run_root,
    check_tracking,
)
CHECKS_OF_A_RUN: tuple[Callable[[RunConfig], Iterator[Finding]], ...] = (check_data, check_engine)
