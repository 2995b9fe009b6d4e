"""The model card: what a gateway must know to write replies, told by the daemon so that gateways hold no model files."""

import hashlib
from pathlib import Path

from decode_daemon.engine.generation import GenerationDefaults
from handoff import decode_pb2 as pb


def model_card(
    *, model: str, identity: str, context_tokens: int, vocab_size: int, model_dir: Path, generation: GenerationDefaults
) -> pb.ModelCard:
    """Read the card's parts from a Hugging Face folder.

    Raises FileNotFoundError when the folder holds no tokenizer.json.
    """
    tokenizer = model_dir / "tokenizer.json"
    if not tokenizer.is_file():
        raise FileNotFoundError(f"{tokenizer} is missing: a gateway cannot turn token ids into text without it")
    card = pb.ModelCard(
        model=model,
        identity=identity,
        context_tokens=context_tokens,
        tokenizer=tokenizer.read_bytes(),
        stop_token_ids=sorted(generation.eos_token_ids),
        eos_token_id=generation.eos_token_id,
        vocab_size=vocab_size,
        defaults=pb.SamplingDefaults(
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            min_p=generation.min_p,
            repetition_penalty=generation.repetition_penalty,
            max_tokens=generation.max_new_tokens,
            presence_penalty=generation.presence_penalty,
            frequency_penalty=generation.frequency_penalty,
        ),
    )
    card.fingerprint = hashlib.sha256(card.SerializeToString(deterministic=True)).hexdigest()[:16]
    return card
