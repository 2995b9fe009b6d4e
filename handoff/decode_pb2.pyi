from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("fingerprint", "model", "identity", "context_tokens", "tokenizer", "stop_token_ids", "defaults")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    model: str
    identity: str
    context_tokens: int
    tokenizer: bytes
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    defaults: SamplingDefaults
    def __init__(self, fingerprint: _Optional[str] = ..., model: _Optional[str] = ..., identity: _Optional[str] = ..., context_tokens: _Optional[int] = ..., tokenizer: _Optional[bytes] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., defaults: _Optional[_Union[SamplingDefaults, _Mapping]] = ...) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "presence_penalty", "frequency_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_tokens: int
    presence_penalty: float
    frequency_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("handoff_id", "slot", "epoch", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "claim")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    slot: int
    epoch: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    claim: bytes
    def __init__(self, handoff_id: _Optional[str] = ..., slot: _Optional[int] = ..., epoch: _Optional[int] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., claim: _Optional[bytes] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("reserved", "landed", "tokens", "failed")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    reserved: Reserved
    landed: Landed
    tokens: Tokens
    failed: Failed
    def __init__(self, reserved: _Optional[_Union[Reserved, _Mapping]] = ..., landed: _Optional[_Union[Landed, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Landed(_message.Message):
    __slots__ = ("prompt_token_ids", "first_token", "bytes", "transfer_seconds")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_token: int
    bytes: int
    transfer_seconds: float
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., first_token: _Optional[int] = ..., bytes: _Optional[int] = ..., transfer_seconds: _Optional[float] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("position", "ids", "finish")
    class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[Tokens.Finish]
        STOP: _ClassVar[Tokens.Finish]
        LENGTH: _ClassVar[Tokens.Finish]
    NONE: Tokens.Finish
    STOP: Tokens.Finish
    LENGTH: Tokens.Finish
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    position: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    finish: Tokens.Finish
    def __init__(self, position: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[Tokens.Finish, str]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
