//! `lockstep selftest`: is a device's arithmetic right on this machine?

use crate::error::{CliError, Result};
use crate::flags::SelftestFlags;
use crate::flags::model::DtypeFlag;
use crate::logging;
use crate::output::say_line;
use lockstep_backend::cuda::CudaOptions;
use lockstep_backend::cuda::selftest::{self, Outcome};
use lockstep_core::{DType, ExitCode};

/// Prints one line an operation and type; errors when one is out of its bound.
pub fn run(flags: &SelftestFlags) -> Result<()> {
    logging::init_command("selftest", &flags.logging);
    if flags.device != "cuda" {
        let sentence = format!("--device {} has no selftest; use cuda", flags.device);
        return Err(CliError::new(ExitCode::Flags, sentence));
    }
    let (mut failed, mut written) = (0, Ok(()));
    say_line(format_args!(
        "{:<26} {:>5} {:>6} {:>10} {:>10}  worst case",
        "operation", "type", "cases", "error", "bound"
    ))?;
    for name in &flags.dtype {
        let flag = DtypeFlag { dtype: name.clone() };
        let dtype = flag.convert().map_err(CliError::with(ExitCode::Flags))?.unwrap_or(DType::Bf16);
        let options = CudaOptions { gpu: flags.gpu, dtype };
        let mut show = |outcome: &Outcome| {
            failed += usize::from(!outcome.passed());
            let verdict = if outcome.passed() { "" } else { "FAILED: " };
            let line = say_line(format_args!(
                "{:<26} {:>5} {:>6} {:>10.1e} {:>10.1e}  {verdict}{}",
                outcome.operation,
                dtype.name(),
                outcome.cases,
                outcome.error_max,
                outcome.bound,
                outcome.worst
            ));
            written = std::mem::replace(&mut written, Ok(())).and(line);
        };
        selftest::run(options, flags.seed, flags.cases, &mut show)
            .and_then(|_| selftest::run_shared(options, flags.seed, flags.cases, &mut show))
            .map_err(CliError::with(ExitCode::Internal))?;
    }
    written?;
    match failed {
        0 => Ok(()),
        count => {
            let sentence = format!("{count} operations differ from the CPU by more than they may");
            Err(CliError::new(ExitCode::Internal, sentence))
        }
    }
}
