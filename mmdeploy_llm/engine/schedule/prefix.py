"""PrefixKeys: the hash chain that identifies the content of a request's full blocks."""

from __future__ import annotations

import hashlib
from array import array

from mmdeploy_llm.request import Request

KEY_SIZE = 32  # bytes; blake2b at this size is collision-proof, so equal keys mean equal content
ROOT_KEY = bytes(KEY_SIZE)  # the parent of every first block
LONG_ROOT_KEY = bytes([1]) * KEY_SIZE  # the same for sequences that are long for their model


class PrefixKeys:
    """Keys of one request's full blocks, each hashed once, when it is first requested.

        key 0 = hash(ROOT_KEY, tokens of block 0, media in block 0)
        key i = hash(key i-1,  tokens of block i, media in block i)

    Media are hashed as (key, offset of the item relative to the block), because the placeholder
    tokens of two different images are the same. Equal keys therefore mean the same tokens and media
    from the start of the prompt to the end of the block. Sequences that are long for their model
    have LONG_ROOT_KEY: it computes other keys and values for them. So does an adapter, whose key is
    part of the root. The scheduler is the only user.
    """

    __slots__ = ("_block_size", "_first_span", "_keys", "_request", "_root")

    def __init__(self, request: Request, block_size: int, *, is_long: bool = False) -> None:
        self._request = request
        self._root = LONG_ROOT_KEY if is_long else ROOT_KEY
        if request.adapter is not None:
            root = self._root + request.adapter.key.encode()
            self._root = hashlib.blake2b(root, digest_size=KEY_SIZE).digest()
        self._block_size = block_size
        self._keys: list[bytes] = []
        self._first_span = 0  # index of the first span that ends after the next block's start

    def key(self, index: int) -> bytes:
        """Returns the key of block `index`, whose tokens must all be known."""
        while len(self._keys) <= index:
            self._keys.append(self._hash_next())
        return self._keys[index]

    def _hash_next(self) -> bytes:
        start = len(self._keys) * self._block_size
        digest = hashlib.blake2b(self._keys[-1] if self._keys else self._root, digest_size=KEY_SIZE)
        digest.update(array("q", self._tokens(start, start + self._block_size)).tobytes())
        media = self._media(start, start + self._block_size)
        if media:
            digest.update(repr(media).encode())
        return digest.digest()

    def _tokens(self, start: int, end: int) -> list[int]:
        prompt, output = self._request.prompt_token_ids, self._request.output_token_ids
        num_prompt = len(prompt)
        if start >= num_prompt:
            tokens = output[start - num_prompt : end - num_prompt]
        elif end <= num_prompt:
            tokens = prompt[start:end]
        else:
            tokens = prompt[start:] + output[: end - num_prompt]
        assert len(tokens) == self._block_size, f"block at token {start} is not full"
        return tokens

    def _media(self, start: int, end: int) -> list[tuple[str, int]]:
        spans = self._request.media
        while self._first_span < len(spans) and spans[self._first_span].end <= start:
            self._first_span += 1
        found = []
        for span in spans[self._first_span :]:
            if span.offset >= end:
                break
            found.append((span.item.key, span.offset - start))
        return found
