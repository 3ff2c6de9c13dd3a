import pytest
from forced import planned, ran
from foreign.registry import FOREIGN
from foreign.spec import train_step
from oracle import SiteBySite, assert_close, assert_same_gradients, gradients
from sweeps import sweep
from torch.utils.checkpoint import set_checkpoint_early_stop

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
COMPUTED = ("weight_norm",)  # its weights are parameters of nobody, so the oracle knows none
# Parameters that are multiplied by each other, by a rule no site; their product is the layer's weight.
ALWAYS = (  # one of each way of writing a GEMM
    "slices", "columns", "functions", "used_twice", "autoencoder_tied", "experts_bmm", "experts_einsum",
    "experts_dispatch", "encoder_padded", "shared_attention", "lstm_tower", "lora_merged", "deepctr_xdeepfm",
    "fuxictr_dcnv2_stacked", "checkpoint_modules_reentrant", "torchrec_dlrm_dcn", "hf_gpt2_lm", "dit",
)  # fmt: skip
NO_SITES = {"lora_merged": ("0.weight", "0.A", "0.B", "2.weight", "2.A", "2.B")}


@pytest.mark.parametrize("name", sweep([name for name in FOREIGN if name not in COMPUTED], ALWAYS))
def test_a_training_step_is_the_oracles(name):
    """It fails where a site multiplies by another view, drops or doubles a bias, or is not run at all."""
    known = planned(name)
    foreign = known.foreign
    expected, found = foreign.build(), known.converted()
    # A recomputation that stops early makes tensors anew of which the oracle has seen no product.
    with (
        set_checkpoint_early_stop(False),
        SiteBySite(expected, but=(*foreign.not_sites, *NO_SITES.get(name, ()))) as oracle,
    ):
        loss = train_step(foreign, expected)
    assert oracle.counts["output or grad_input"]
    assert_close(train_step(foreign, found), loss, what="loss")
    assert_same_gradients(found, gradients(expected))
    assert ran(found) == known.fp8
