//! How a checkpoint says that its weights are quantised (`quantization_config`).
//!
//! Only the fields that change how stored bytes become numbers; reading them is the `weights`
//! crate's work. Methods other than these are refused by name.

use super::ConfigError;
use serde_json::{Map, Value};

/// A quantised checkpoint that can be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QuantizationConfig {
    /// 8-bit floats (e4m3) with `weight_scale_inv` per block or `weight_scale` per tensor.
    Fp8 {
        /// Rows and columns that share a scale; `None`: one scale per tensor.
        block_size: Option<(usize, usize)>,
        /// Modules kept in their float type, by name.
        unquantised: Vec<String>,
    },
    /// GPTQ: `qweight`, `qzeros`, `scales` and, with activation order, `g_idx`.
    Gptq {
        /// Bits per weight.
        bits: u32,
        /// Inputs that share a scale; `None`: one group over all inputs (-1 in the file).
        group_size: Option<usize>,
        /// The file orders inputs by activation (`g_idx` maps them to groups).
        activation_order: bool,
        /// Zeros are stored as they are (`gptq_v2`) instead of less 1.
        second_format: bool,
    },
    /// AWQ: `qweight`, `qzeros`, `scales` in the packing of AutoAWQ's `gemm` version.
    Awq {
        /// Bits per weight.
        bits: u32,
        /// Inputs that share a scale; `None`: one group over all inputs (-1 in the file).
        group_size: Option<usize>,
    },
}

impl QuantizationConfig {
    /// Reads the value of `quantization_config`.
    ///
    /// Errors name the method or key that is not supported.
    pub fn parse(map: &Map<String, Value>) -> Result<Self, ConfigError> {
        let method = map.get("quant_method").and_then(Value::as_str).unwrap_or("(none named)");
        let reader = Reader { map, method };
        match method {
            "fp8" => reader.fp8(),
            "gptq" => reader.gptq(),
            "awq" => reader.awq(),
            other => Err(ConfigError::Unsupported {
                key: "quantization_config.quant_method".into(),
                got: other.into(),
                family: "all".into(),
                want: "only fp8, gptq and awq".into(),
            }),
        }
    }
}

struct Reader<'a> {
    map: &'a Map<String, Value>,
    method: &'a str,
}

impl Reader<'_> {
    fn fp8(&self) -> Result<QuantizationConfig, ConfigError> {
        self.only("fmt", &["e4m3"])?;
        let block_size = match self.get("weight_block_size") {
            None => None,
            Some(v) => {
                let side = |i: usize| v.get(i).and_then(Value::as_u64).filter(|n| *n > 0);
                match (side(0), side(1)) {
                    (Some(rows), Some(cols)) => Some((rows as usize, cols as usize)),
                    _ => return Err(self.bad("weight_block_size", v, "two positive whole numbers")),
                }
            }
        };
        let names = self.get("modules_to_not_convert").or_else(|| self.get("ignored_layers"));
        let text = |name: &Value| name.as_str().map(str::to_owned);
        let unquantised = match names.map(|v| (v, v.as_array())) {
            None => Some(Vec::new()),
            Some((_, list)) => list.and_then(|names| names.iter().map(text).collect()),
        };
        let unquantised = unquantised.ok_or_else(|| {
            self.bad("modules_to_not_convert", names.unwrap_or(&Value::Null), "a list of names")
        })?;
        Ok(QuantizationConfig::Fp8 { block_size, unquantised })
    }

    fn gptq(&self) -> Result<QuantizationConfig, ConfigError> {
        self.only("checkpoint_format", &["gptq", "gptq_v2"])?;
        self.only("pack_dtype", &["int32"])?;
        if let Some(v) = self.get("dynamic")
            && !v.as_object().is_some_and(Map::is_empty)
        {
            return Err(self.unsupported("dynamic", v, "the same bits and groups for all modules"));
        }
        Ok(QuantizationConfig::Gptq {
            bits: self.bits()?,
            group_size: self.group_size()?,
            activation_order: match self.get("desc_act") {
                None => false,
                Some(v) => v.as_bool().ok_or_else(|| self.bad("desc_act", v, "true or false"))?,
            },
            second_format: self.get("checkpoint_format").and_then(Value::as_str) == Some("gptq_v2"),
        })
    }

    fn awq(&self) -> Result<QuantizationConfig, ConfigError> {
        self.only("version", &["gemm", "GEMM"])?;
        if let Some(v) = self.get("zero_point")
            && v.as_bool() != Some(true)
        {
            return Err(self.unsupported("zero_point", v, "only true"));
        }
        Ok(QuantizationConfig::Awq { bits: self.bits()?, group_size: self.group_size()? })
    }

    /// 4 bits, the only width that is read.
    fn bits(&self) -> Result<u32, ConfigError> {
        match self.get("bits") {
            Some(v) if v.as_u64() == Some(4) => Ok(4),
            Some(v) => Err(self.unsupported("bits", v, "only 4")),
            None => Err(self.bad("bits", &Value::Null, "4")),
        }
    }

    fn group_size(&self) -> Result<Option<usize>, ConfigError> {
        match self.get("group_size").map(|v| (v, v.as_i64())) {
            Some((_, Some(-1))) => Ok(None),
            Some((_, Some(size))) if size > 0 => Ok(Some(size as usize)),
            Some((v, _)) => Err(self.bad("group_size", v, "-1 or a positive whole number")),
            None => Err(self.bad("group_size", &Value::Null, "-1 or a positive whole number")),
        }
    }

    /// Refuses a value of `key` that is not in `accepted`; absent is fine.
    fn only(&self, key: &str, accepted: &[&str]) -> Result<(), ConfigError> {
        match self.get(key) {
            Some(v) if !v.as_str().is_some_and(|text| accepted.contains(&text)) => {
                Err(self.unsupported(key, v, &format!("only {}", accepted.join(", "))))
            }
            _ => Ok(()),
        }
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn bad(&self, key: &str, got: &Value, want: &str) -> ConfigError {
        ConfigError::bad(&format!("quantization_config.{key}"), got, want)
    }

    fn unsupported(&self, key: &str, got: &Value, want: &str) -> ConfigError {
        ConfigError::unsupported(&format!("quantization_config.{key}"), got, self.method, want)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: Value) -> Result<QuantizationConfig, ConfigError> {
        QuantizationConfig::parse(value.as_object().unwrap())
    }

    #[test]
    fn the_three_methods() {
        let qwen_fp8 = json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]});
        assert_eq!(
            parse(qwen_fp8).unwrap(),
            QuantizationConfig::Fp8 { block_size: Some((128, 128)), unquantised: vec!["lm_head".into()] }
        );
        let gptq =
            json!({"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": true, "sym": true});
        assert_eq!(
            parse(gptq).unwrap(),
            QuantizationConfig::Gptq {
                bits: 4,
                group_size: None,
                activation_order: true,
                second_format: false
            }
        );
        let second =
            json!({"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"});
        assert!(matches!(parse(second), Ok(QuantizationConfig::Gptq { second_format: true, .. })));
        let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm",
            "zero_point": true});
        assert_eq!(parse(awq).unwrap(), QuantizationConfig::Awq { bits: 4, group_size: Some(128) });
    }

    #[test]
    fn others_are_refused_by_name() {
        for (value, word) in [
            (json!({"quant_method": "bitsandbytes"}), "bitsandbytes"),
            (json!({}), "(none named)"),
            (json!({"quant_method": "fp8", "fmt": "e5m2"}), "e5m2"),
            (json!({"quant_method": "gptq", "bits": 3, "group_size": 128}), "bits"),
            (json!({"quant_method": "gptq", "bits": 4}), "group_size"),
            (json!({"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {"a": {}}}), "dynamic"),
            (json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}), "marlin"),
            (
                json!({"quant_method": "gptq", "bits": 4, "group_size": 64, "pack_dtype": "int8"}),
                "pack_dtype",
            ),
            (json!({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": "yes"}), "desc_act"),
            (json!({"quant_method": "fp8", "ignored_layers": ["lm_head", 3]}), "modules_to_not_convert"),
            (json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}), "gemv"),
        ] {
            let message = parse(value).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }
}
