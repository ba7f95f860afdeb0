//! What differs from layer to layer: sliding windows and experts.

use super::Result;
use super::reader::Reader;
use crate::config::{Family, ModelConfig, MoeConfig};
use serde_json::Value;

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";
/// The window of every class that has one where the file does not name a width.
const WINDOW_DEFAULT: usize = 4096;

/// Which layers see only a window, and how wide it is.
pub(super) fn read_windows(reader: &Reader<'_>, config: &mut ModelConfig) -> Result<()> {
    let window = window(reader)?;
    let sliding = sliding_layers(reader, config.num_layers, window.is_some())?;
    let any = sliding.contains(&true);
    if any && window.is_none() {
        let because = |want: &str| format!("{want}, because layer_types names sliding layers");
        let said = |key: &str| reader.map.get(key).unwrap_or(&Value::Null);
        return Err(match reader.family {
            Family::Qwen2 | Family::Qwen3 if reader.flag("use_sliding_window")? != Some(true) => {
                reader.bad("use_sliding_window", said("use_sliding_window"), &because("true"))
            }
            _ => reader.bad("sliding_window", said("sliding_window"), &because("a width")),
        });
    }
    config.sliding_window = window.filter(|_| any);
    config.sliding_layers = sliding;
    Ok(())
}

/// The width, if the file and the family ask for a window at all.
fn window(reader: &Reader<'_>) -> Result<Option<usize>> {
    let given = reader.optional_count("sliding_window")?;
    // Null turns the window off, an absent key is the class default.
    let absent = !reader.map.contains_key("sliding_window");
    let or_default = given.or(absent.then_some(WINDOW_DEFAULT));
    match reader.family {
        Family::Llama => match given {
            Some(width) => Err(reader.unsupported("sliding_window", &Value::from(width), "only null")),
            None => Ok(None),
        },
        Family::Phi3 => Ok(given),
        Family::Mistral | Family::Gemma2 | Family::Gemma3 => Ok(or_default),
        Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => {
            let used = reader.flag("use_sliding_window")?.unwrap_or(false);
            Ok(or_default.filter(|_| used))
        }
    }
}

fn sliding_layers(reader: &Reader<'_>, num_layers: usize, windowed: bool) -> Result<Vec<bool>> {
    let listed = listed_layers(reader, num_layers)?;
    let by_index = |slides: &dyn Fn(usize) -> bool| (0..num_layers).map(slides).collect::<Vec<bool>>();
    match reader.family {
        Family::Qwen2 | Family::Qwen3 => {
            let first = reader
                .get("max_window_layers")
                .map(|v| v.as_u64().ok_or_else(|| reader.bad("max_window_layers", v, "a whole number")));
            let first = first.transpose()?.unwrap_or(28) as usize; // the class default
            Ok(listed.unwrap_or_else(|| by_index(&|i| windowed && i >= first)))
        }
        Family::Gemma2 => Ok(listed.unwrap_or_else(|| by_index(&|i| i % 2 == 0))),
        Family::Gemma3 => {
            let pattern = reader.count("sliding_window_pattern", Some(6))?; // the class default
            Ok(listed.unwrap_or_else(|| by_index(&|i| !(i + 1).is_multiple_of(pattern))))
        }
        Family::Llama | Family::Mistral | Family::Qwen3Moe | Family::Phi3 => {
            let uniform = vec![windowed; num_layers];
            match listed {
                Some(listed) if listed != uniform => {
                    let got = reader.map.get("layer_types").unwrap_or(&Value::Null);
                    Err(reader.unsupported("layer_types", got, "all layers are alike in this family"))
                }
                _ => Ok(uniform),
            }
        }
    }
}

/// `layer_types`, if the file has it.
fn listed_layers(reader: &Reader<'_>, num_layers: usize) -> Result<Option<Vec<bool>>> {
    let Some(v) = reader.get("layer_types") else { return Ok(None) };
    let types = v.as_array().filter(|types| types.len() == num_layers);
    let Some(types) = types else {
        return Err(reader.bad("layer_types", v, &format!("a list of {num_layers} names")));
    };
    let slides = |t: &Value| match t.as_str() {
        Some(SLIDING) => Ok(true),
        Some(FULL) => Ok(false),
        _ => Err(reader.unsupported("layer_types", t, "only full_attention and sliding_attention")),
    };
    types.iter().map(slides).collect::<Result<Vec<bool>>>().map(Some)
}

/// The experts of Qwen3-MoE: a layer is sparse unless `mlp_only_layers` lists it or it falls
/// between the steps of `decoder_sparse_step`.
pub(super) fn read_experts(reader: &Reader<'_>, num_layers: usize) -> Result<MoeConfig> {
    // transformers 5 may write the key under its internal name.
    let key = if reader.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let num_experts =
        reader.optional_count(key)?.ok_or_else(|| reader.missing("num_experts (or num_local_experts)"))?;
    let step = reader.count("decoder_sparse_step", Some(1))?;
    let dense: Vec<usize> = match reader.get("mlp_only_layers") {
        None => Vec::new(),
        Some(v) => {
            let index = |i: &Value| i.as_u64().map(|i| i as usize).filter(|i| *i < num_layers);
            v.as_array()
                .filter(|list| list.len() <= num_layers)
                .and_then(|list| list.iter().map(index).collect())
                .ok_or_else(|| {
                    let want = format!("a list of at most {num_layers} layer numbers below {num_layers}");
                    reader.bad("mlp_only_layers", v, &want)
                })?
        }
    };
    Ok(MoeConfig {
        num_experts,
        experts_per_token: reader.count("num_experts_per_tok", None)?,
        expert_intermediate_size: reader.count("moe_intermediate_size", None)?,
        norm_topk_prob: reader.flag("norm_topk_prob")?.unwrap_or(false),
        sparse_layers: (0..num_layers).map(|i| !dense.contains(&i) && (i + 1).is_multiple_of(step)).collect(),
    })
}
