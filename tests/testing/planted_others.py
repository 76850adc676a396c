"""Bugs planted in the built-in fetchers and logits processors, and observers that break a rule."""

import contextlib
import dataclasses
import os
import time
from pathlib import Path

import mmdeploy_llm_plugins.logits.processors as logits
import mmdeploy_llm_processors.remote as remote
import mmdeploy_llm_processors.remote.http as http
import mmdeploy_llm_processors.sources as sources
import torch
from mmdeploy_llm_plugins.logits.processors import LogitBias, RepetitionWindow
from mmdeploy_llm_processors.remote import connection


def wrapped(owner, name, change):
    return lambda put: put(owner, name, change(getattr(owner, name)))


def with_limits(**fields):
    """Forgets limits on the way to the function that reads."""
    return lambda fetch: lambda ref, limits: fetch(ref, dataclasses.replace(limits, **fields))


def by_name(read):
    """Compares the beginnings of paths, and does not resolve links."""

    def changed(path, ref, limits):
        root = limits.allowed_root
        if root is None or os.path.normpath(path).startswith(str(root)):
            return read(path, ref, dataclasses.replace(limits, allowed_root=None))
        return read(path, ref, limits)

    return changed


def whole_file(read):
    def changed(path, ref, limits):
        if Path(path).is_file():
            with open(path, "rb") as file:
                blob = file.read(2**27)
            limits.check_bytes(len(blob), "the file")
        return read(path, ref, limits)

    return changed


def opens_pipes(read):
    def changed(path, ref, limits):
        if "\0" not in path and Path(path[:200]).is_fifo():
            time.sleep(60)
        return read(path, ref, limits)

    return changed


def never_none(fetch):
    def changed(ref, limits):
        found = fetch(ref, limits)
        return b"" if found is None else found

    return changed


def any_host(_):
    return lambda *_: None


def any_address(_):
    class Backend(connection.CheckedBackend):
        def __init__(self, resolve, deadline, *, allow_private):
            super().__init__(resolve, deadline, allow_private=True)

    return Backend


def whole_answer(read):
    """Reads all of the answer before it looks at the limit."""

    def changed(response, name, limits):
        if response.status != 200:
            return read(response, name, limits)
        blob = b"".join(response.iter_stream())
        limits.check_bytes(len(blob), name)
        return http.Answer(body=blob)

    return changed


def long_timeout(deadline):
    return lambda seconds, name: deadline(30.0, name)


def shown(_):
    def changed(self):
        return f"{self.scheme}://{self.host}{self.path}"

    return changed


def ignoring_errors(fetch):
    def changed(ref, limits):
        with contextlib.suppress(Exception):
            return fetch(ref, limits)
        return None

    return changed


FETCHERS = {
    "the root compared by name": (
        "sources", wrapped(sources, "read_local", by_name), "files_outside_the_root_are_refused"),
    "the root forgotten": (
        "sources", wrapped(sources, "fetch_media", with_limits(allowed_root=None)),
        "files_outside_the_root_are_refused"),
    "a file read before its size": (
        "sources", wrapped(sources, "read_local", whole_file), "giants_are_refused"),
    "the limit of bytes forgotten": (
        "sources", wrapped(sources, "fetch_media", with_limits(max_bytes=2**24)),
        "bytes_are_limited"),
    "waits for a pipe": (
        "sources", wrapped(sources, "read_local", opens_pipes), "what_is_no_file_is_refused"),
    "takes what is another's": (
        "sources", wrapped(sources, "fetch_media", never_none), "passes_what_is_not_its_own"),
    "errors swallowed": (
        "sources", wrapped(sources, "fetch_media", ignoring_errors),
        "what_is_no_file_is_refused"),
    "URLs always on": (
        "remote", wrapped(remote, "fetch_media", with_limits(allow_urls=True)),
        "urls_are_off_until_allowed"),
    "hosts not checked": (
        "remote", wrapped(http, "_check_host", any_host), "redirects_are_checked"),
    "private addresses allowed": (
        "remote", wrapped(http, "CheckedBackend", any_address), "urls_are_off_until_allowed"),
    "the whole answer read": ("remote", wrapped(http, "_read", whole_answer), "giants_are_refused"),
    "no end of time": (
        "remote", wrapped(http, "Deadline", long_timeout), "servers_cannot_hold_it"),
    "queries shown": ("remote", wrapped(http.Target, "__str__", shown), "secrets_are_not_shown"),
}  # fmt: skip


def all_rows(apply):
    def changed(self, values, rows):
        index = torch.cat([logits._recent(row) for row in rows])
        values[:, index] = values[:, index] * 0.5
        return values

    return changed


def shifted(index):
    """Counts rows from the end."""
    return lambda ids, values: index(ids[::-1], values)


def cumulative(apply):
    def changed(self, values, rows):
        self.total = getattr(self, "total", 0) + 1
        return apply(self, values, rows) + self.total

    return changed


def counts_steps(apply):
    def changed(self, values, rows):
        for row in rows:
            row.output_token_ids = list(row.output_token_ids)[:-1]
        return apply(self, values, rows)

    return changed


def nan_for_all(apply):
    return lambda self, values, rows: apply(self, values, rows) - values.max() + values.max()


LOGITS = {
    "tokens of one row banned in all": (
        RepetitionWindow, wrapped(RepetitionWindow, "apply", all_rows),
        "rows_do_not_influence_each_other"),
    "rows in another order": (
        RepetitionWindow, wrapped(logits, "_flat_index", shifted),
        "rows_do_not_influence_each_other"),
    "a number of the calls": (
        LogitBias, wrapped(LogitBias, "apply", cumulative), "applying_twice_is_the_same"),
    "tokens removed from the request": (
        RepetitionWindow, wrapped(RepetitionWindow, "apply", counts_steps),
        "rows_are_left_as_they_are"),
    "a sum over the batch": (
        RepetitionWindow, wrapped(RepetitionWindow, "apply", nan_for_all),
        "rows_do_not_influence_each_other"),
}  # fmt: skip
