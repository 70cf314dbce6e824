"""Values as they are stored: strict JSON bytes, typed by annotations, refused when they would come back different.

No pickle, and nothing imported by a name that was stored.
"""

from umt_durable.codec.arguments import decode_arguments, encode_arguments, fingerprint
from umt_durable.codec.refusal import MAX_BYTES, MAX_DEPTH, MAX_DIGITS
from umt_durable.codec.schema import InputSchema, first_annotation, return_annotation
from umt_durable.codec.value import EMPTY, Codec, Encoded, check_annotation, decode, encode, round_trip

__all__ = [
    "EMPTY",
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_DIGITS",
    "Codec",
    "Encoded",
    "InputSchema",
    "check_annotation",
    "decode",
    "decode_arguments",
    "encode",
    "encode_arguments",
    "fingerprint",
    "first_annotation",
    "return_annotation",
    "round_trip",
]
