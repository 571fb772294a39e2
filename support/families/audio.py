"""Sound, music and proteins."""

from support.cases import BATCHED, NO_GUIDANCE, TWO_CALLS, Cases

case = Cases()

ACE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
ACE |= {"head_dim": 8, "in_channels": 24, "audio_acoustic_hidden_dim": 8, "patch_size": 2, "sliding_window": 16}


@case("AceStepTransformer1DModel", cfg=BATCHED, prompt="any", **ACE)
def ace_step(draw):
    return {
        "hidden_states": draw(2, 8, 8),
        "timestep": draw.unit(2),
        "timestep_r": draw.unit(2),
        "encoder_hidden_states": draw(2, 10, 32),
        "context_latents": draw(2, 8, 16),
    }


STABLE = {
    "sample_size": 16,
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "out_channels": 4,
}
STABLE |= {"num_key_value_attention_heads": 2, "cross_attention_dim": 16, "time_proj_dim": 8, "global_states_input_dim": 12}


@case("StableAudioDiTModel", cfg=BATCHED, prompt="128", **STABLE, cross_attention_input_dim=16)
def stable_audio(draw):
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    rotary = get_1d_rotary_pos_embed(4, 17, use_real=True, repeat_interleave_real=False)
    return {
        "hidden_states": draw(2, 4, 16),
        "timestep": draw.unit(2),
        "encoder_hidden_states": draw(2, 6, 16),
        "global_hidden_states": draw(2, 1, 12),
        "rotary_embedding": tuple(table.to(draw.device) for table in rotary),
    }


STABLE3 = {"io_channels": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "cond_token_dim": 16, "global_cond_dim": 12}
STABLE3 |= {"local_add_cond_dim": 5, "timestep_features_dim": 16, "ff_mult": 2.0, "num_memory_tokens": 3}


@case("StableAudio3DiTModel", cfg=BATCHED, prompt="256", **STABLE3)
def stable_audio3(draw):
    return {
        "hidden_states": draw(2, 8, 16),
        "timestep": draw.unit(2),
        "encoder_hidden_states": draw(2, 4, 16),
        "global_hidden_states": draw(2, 12),
    }


@case(
    "LongCatAudioDiTTransformer",
    cfg=TWO_CALLS,
    prompt="any, masked",
    changes="lengths of prompt and sound",
    dit_dim=64,
    dit_depth=2,
    dit_heads=4,
    dit_text_dim=32,
    latent_dim=8,
    text_conv=False,
)
def longcat_audio(draw):
    return {
        "hidden_states": draw(1, 16, 8),
        "encoder_hidden_states": draw(1, 10, 32),
        "encoder_attention_mask": draw.mask([draw.pick(10, 6)], 10),
        "attention_mask": draw.mask([draw.pick(16, 12)], 16),
        "timestep": draw.unit(1),
    }


MINIMAX = {"in_channels": 8, "condition_dim": 16, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
MINIMAX |= {"ff_inner_dim": 32, "rotary_dim": 4, "fourier_embedding_dim": 8}


@case("MiniMaxMusic3Transformer1DModel", cfg=TWO_CALLS, **MINIMAX)
def minimax_music(draw):
    return {"hidden_states": draw(1, 8, 24), "encoder_hidden_states": draw(1, 24, 16), "timestep": draw.unit(1)}


@case("T5FilmDecoder", cfg=NO_GUIDANCE, input_dims=8, targets_length=16, d_model=16, num_layers=1, num_heads=2, d_kv=8, d_ff=16)
def t5_film(draw):
    encodings = [(draw(1, 6, 16), draw.mask([6], 6)), (draw(1, 4, 16), draw.mask([3], 4))]
    return {"encodings_and_masks": encodings, "decoder_input_tokens": draw(1, 16, 8), "decoder_noise_time": draw.unit(1)}


@case(
    "UNet1DModel",
    cfg=NO_GUIDANCE,
    block_out_channels=(8, 8),
    in_channels=4,
    out_channels=4,
    time_embedding_type="positional",
    use_timestep_embedding=True,
    flip_sin_to_cos=False,
    freq_shift=1.0,
    out_block_type="OutConv1DBlock",
    mid_block_type="MidResTemporalBlock1D",
    down_block_types=("DownResnetBlock1D",) * 2,
    up_block_types=("UpResnetBlock1D",),
    act_fn="swish",
)
def unet_1d(draw):
    return {"sample": draw(2, 4, 16), "timestep": draw.steps(2)}


@case(
    "UNet1DModel",
    "a timestep on the host",
    cfg=NO_GUIDANCE,
    prompt="",
    sample_size=64,
    block_out_channels=(32, 32, 64),
    in_channels=2,
    out_channels=2,
    extra_in_channels=64,
)
def unet_1d_dance(draw):
    return {"sample": draw(1, 2, 64), "timestep": 500}


PROTEINA = {"nlayers": 2, "token_dim": 16, "nheads": 2, "dim_cond": 16, "pair_repr_dim": 8, "latent_dim": 4, "t_emb_dim": 16}
PROTEINA |= {"token_type_emb_dim": 4, "cath_emb_dim": 4, "seq_sep_dim": 8, "xt_pair_dist_dim": 6, "tri_mult_c": 8}
PROTEINA |= {"feats_seq": ("xt_bb_ca", "xt_local_latents", "token_type"), "feats_pair_repr": ("xt_bb_ca_pair_dists",)}


@case("RFD4ProteinaTransformer", cfg=NO_GUIDANCE, **PROTEINA, feats_cond_seq=("time_emb_bb_ca", "time_emb_local_latents"))
def proteina(draw):
    return {
        "bb_ca": draw(1, 6, 3),
        "local_latents": draw(1, 6, 4),
        "bb_ca_time": draw.unit(1),
        "local_latents_time": draw.unit(1),
        "padding_mask": draw.mask([6], 6),
        "token_type": draw.ints(7, 1, 6),
        "conditioning": {"is_in_context_conditioning": draw.mask([1], 6), "supports_local_latent": draw.mask([5], 6)},
    }
