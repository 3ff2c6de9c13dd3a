from .models import (
    autoint,
    checkpointed,
    deepctr,
    dit,
    dlrm,
    encoders,
    experts,
    fuxictr,
    hugging_face,
    lora,
    slices,
    towers,
)

FOREIGN = {
    foreign.name: foreign
    for family in (
        towers, slices, experts, encoders, lora, autoint, deepctr, fuxictr, checkpointed, dlrm, hugging_face,
        dit,
    )
    for foreign in family.MODELS
}  # fmt: skip
