"""GPT-2's alphabet, in which tokens of byte-level BPE are written: a byte that is a visible
character of Latin-1 stands for itself, the others have the characters from U+0100 on, in their
order. transformers has it too (`bytes_to_unicode`), but takes a second to be imported."""

from types import MappingProxyType

VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
OTHERS = tuple(byte for byte in range(256) if byte not in VISIBLE)
BYTE_OF = MappingProxyType(
    {chr(byte): byte for byte in VISIBLE}
    | {chr(0x100 + place): byte for place, byte in enumerate(OTHERS)}
)
