//! `lockstep doctor`: what this machine has, what of it Lockstep can use, and how fast that is.
//!
//! Loads no model and changes nothing. Everything is found and reported; what is missing is a line that says what
//! to do about it, not an error, unless `--device` asks for a device that cannot be used.

mod cpu;
mod cuda;

use crate::error::{CliError, Result};
use crate::flags::DoctorFlags;
use crate::logging;
use crate::output::{say, say_line};
use lockstep_comm::NcclCollective;
use lockstep_core::ExitCode;

/// What a section has found.
#[derive(Debug, Default)]
struct Section {
    title: &'static str,
    lines: Vec<(String, String)>,
}

impl Section {
    fn new(title: &'static str) -> Self {
        Self { title, lines: Vec::new() }
    }

    /// Adds a line.
    fn line(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.lines.push((name.into(), value.into()));
    }

    fn text(&self) -> String {
        let width = self.lines.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let line = |(name, value): &(String, String)| format!("  {name:<width$}  {value}\n");
        format!("{}\n{}", self.title, self.lines.iter().map(line).collect::<String>())
    }

    fn json(&self) -> serde_json::Value {
        let pairs = self.lines.iter().map(|(name, value)| (name.clone(), value.clone().into()));
        serde_json::Value::Object(pairs.collect())
    }
}

/// Whether a device can be used, and if not, why.
type Verdict = std::result::Result<String, String>;

/// Prints the report, section by section as they are made.
pub fn run(flags: &DoctorFlags) -> Result<()> {
    logging::init_command("doctor", &flags.logging);
    if !["auto", "cpu", "cuda"].contains(&flags.device.as_str()) {
        let sentence = format!("--device {} is not known; use auto, cpu or cuda", flags.device);
        return Err(CliError::new(ExitCode::Flags, sentence));
    }
    // SAFETY: nothing of CUDA is open yet, and this program has no other thread.
    unsafe { NcclCollective::prepare_environment() };
    let (mut sections, mut written) = (Vec::new(), Ok(()));
    let mut show = |section: Section| {
        if !flags.json && written.is_ok() {
            written = say(section.text());
        }
        sections.push(section);
    };
    show(cpu::machine());
    if !flags.quick {
        show(cpu::speed()?);
    }
    let verdict = cuda::examine(flags.quick, &mut show);
    let mut last = Section::new("verdict");
    last.line("--device cpu", "can be used");
    last.line(
        "--device cuda",
        verdict.as_ref().map_or_else(|why| format!("cannot be used: {why}"), Clone::clone),
    );
    show(last);
    written?;
    if flags.json {
        let pairs = sections.iter().map(|section| (section.title.to_owned(), section.json()));
        say_line(serde_json::Value::Object(pairs.collect()))?;
    }
    match verdict {
        Err(why) if flags.device == "cuda" => {
            Err(CliError::new(ExitCode::Flags, format!("--device cuda cannot be used: {why}")))
        }
        _ => Ok(()),
    }
}

/// Bytes as GiB with one digit.
fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_lines_for_people_and_pairs_for_programs() {
        let mut section = Section::new("machine");
        section.line("memory", gib(3 << 29));
        section.line("open files", "1024");
        assert_eq!(section.text(), "machine\n  memory      1.5 GiB\n  open files  1024\n");
        assert_eq!(section.json(), serde_json::json!({"memory": "1.5 GiB", "open files": "1024"}));
    }

    #[test]
    fn a_machine_is_described_without_a_measurement() {
        let section = cpu::machine();
        let names: Vec<_> = section.lines.iter().map(|(name, _)| name.as_str()).collect();
        for name in ["lockstep", "processor", "memory", "open files", "cache"] {
            assert!(names.contains(&name), "{name} in {names:?}");
        }
    }
}
