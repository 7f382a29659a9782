//! `config.json`: what is taken, and what is refused with which words.

use deuteron_gpt2::{Activation, Config, SizeError};

/// GPT-2's own file, shortened to what is looked at and some that is not.
const GPT2: &str = r#"{
  "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
  "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
  "n_positions": 1024, "task_specific_params": {"text-generation": {"do_sample": true}}, "vocab_size": 50257
}"#;

fn changed(from: &str, to: &str) -> Result<Config, String> {
    assert!(GPT2.contains(from));
    Config::from_json(&GPT2.replace(from, to)).map_err(|error| error.to_string())
}

/// With more keys.
fn with(keys: &str) -> Result<Config, String> {
    changed(r#""model_type": "gpt2""#, &format!(r#""model_type": "gpt2", {keys}"#))
}

#[test]
fn published_sizes_have_their_names() {
    assert_eq!(Config::from_json(GPT2), Ok(Config::SMALL));
    let xl = GPT2
        .replace("768", "1600")
        .replace(r#""n_head": 12"#, r#""n_head": 25"#)
        .replace("n_layer\": 12", "n_layer\": 48");
    assert_eq!(Config::from_json(&xl), Ok(Config::XL));
}

#[test]
fn what_kin_vary_is_read() {
    let other = Config { name: Config::OTHER, ..Config::SMALL };
    assert_eq!(with(r#""n_inner": 1000"#), Ok(Config { inner: Some(1000), ..other }));
    assert_eq!(with(r#""n_inner": 3072, "pruned_heads": {}"#), Ok(Config::SMALL));
    assert_eq!(with(r#""n_inner": null, "quantization_config": null"#), Ok(Config::SMALL));
    assert_eq!(with(r#""tie_word_embeddings": false"#), Ok(Config { tied: false, ..other }));
    assert_eq!(with(r#""scale_attn_weights": false"#), Ok(Config { scaled: false, ..other }));
    assert_eq!(changed("1e-05", "1e-6"), Ok(Config { epsilon: 1e-6, ..other }));
    assert_eq!(changed(r#""n_positions": 1024, "#, ""), Ok(Config::SMALL), "n_ctx is the older name");
    let kinds = [
        ("gelu_pytorch_tanh", Activation::GeluTanh),
        ("gelu", Activation::GeluErf),
        ("relu", Activation::Relu),
        ("silu", Activation::Silu),
    ];
    for (name, activation) in kinds {
        assert_eq!(changed("gelu_new", name).map(|config| config.activation), Ok(activation));
    }
}

#[test]
fn what_the_engine_does_not_do_is_refused() {
    let says = |result: Result<Config, String>, words: &str| assert_eq!(result, Err(words.to_string()));
    says(with(r#""reorder_and_upcast_attn": true"#), "`reorder_and_upcast_attn` is true; only false is supported");
    says(
        with(r#""scale_attn_by_inverse_layer_idx": true"#),
        "`scale_attn_by_inverse_layer_idx` is true; only false is supported",
    );
    says(with(r#""add_cross_attention": true"#), "`add_cross_attention` is true; only false is supported");
    says(with(r#""pruned_heads": {"1": [0]}"#), "`pruned_heads` is {\"1\":[0]}; only {} is supported");
    says(
        changed("gelu_new", "tanh"),
        "`activation_function` is `tanh`; expected gelu_new, gelu_pytorch_tanh, gelu, relu or silu",
    );
    says(
        changed(r#""model_type": "gpt2""#, r#""model_type": "llama""#),
        "`model_type` is `llama`; only gpt2 is supported",
    );
}

#[test]
fn sizes_out_of_range_are_refused() {
    let says = |result: Result<Config, String>, words: &str| assert_eq!(result, Err(words.to_string()));
    says(changed(r#""n_head": 12"#, r#""n_head": 13"#), "`n_head` must divide `n_embd`, got 13 heads and 768 features");
    says(changed(r#""n_head": 12"#, r#""n_head": 0"#), "`n_head` must be from 1 to 131072, got 0");
    says(changed("768", "18446744073709551615"), "`n_embd` must be from 1 to 131072, got 18446744073709551615");
    says(changed("50257", "4294967296"), "`vocab_size` must be from 1 to 16777216, got 4294967296");
    says(changed("1e-05", "0"), "`layer_norm_epsilon` must be above 0 and at most 1, got 0");
    for (from, to) in
        [("768", "-1"), ("768", "7.5"), (r#""n_layer": 12,"#, ""), ("{", "["), ("768", "768, \"n_embd\": 768")]
    {
        let error = changed(from, to).unwrap_err();
        assert!(error.starts_with("not the configuration of a GPT-2: "), "{error}");
    }
    assert_eq!(
        Config { layers: 0, ..Config::SMALL }.check(),
        Err(SizeError::Range { key: "n_layer", most: 1024, got: 0 })
    );
}
