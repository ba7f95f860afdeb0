//! From flags to a server that can be asked and the name of its model.

use super::http::Client;
use super::started::StartedServer;
use crate::error::{CliError, Result};
use crate::flags::client::TargetFlags;
use lockstep_core::ExitCode;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

/// A server, the model that is asked, and the means to ask.
#[derive(Debug)]
pub struct Target {
    /// Asks the server.
    pub client: Client,
    /// The model's name on the server.
    pub model: String,
    /// Names of all models of the server; empty where it does not tell.
    pub served: Vec<String>,
    server: Option<StartedServer>,
}

/// The runtime of a client: one thread, so that a client costs at most one core.
pub fn runtime() -> Result<Runtime> {
    Builder::new_current_thread().enable_all().build().map_err(CliError::with(ExitCode::Internal))
}

impl Target {
    /// Reaches the server of `--url`, or starts one for `--model`; `connections_max` as [`Client::new`] has it.
    ///
    /// Runs on the main thread, outside a runtime. Exit codes: 2 flags, those of `lockstep serve`, and 1
    /// when the server cannot be asked.
    pub fn open(flags: &TargetFlags, runtime: &Runtime, connections_max: usize) -> Result<Self> {
        let (server, asked) = match (&flags.url, &flags.model) {
            (None, None) => {
                let text = "no model: give --model to start a server for one, or --url of a running server";
                return Err(CliError::new(ExitCode::Flags, text));
            }
            (Some(_), _) if !flags.serve_flags.is_empty() => {
                let text = "flags behind -- are for a server that is started; leave out --url or them";
                return Err(CliError::new(ExitCode::Flags, text));
            }
            (Some(_), name) => (None, name.as_deref()),
            (None, Some(model)) => (Some(StartedServer::start(model, &flags.serve_flags)?), None),
        };
        let url =
            server.as_ref().map_or_else(|| flags.url.as_deref().unwrap_or_default(), |s| s.url.as_str());
        let client = Client::new(url, flags.api_key.as_deref(), connections_max)
            .map_err(CliError::with(ExitCode::Flags))?;
        let served = runtime.block_on(served_models(&client, asked.is_some()))?;
        let model = choose(&client.base(), &served, asked)?;
        Ok(Self { client, model, served, server })
    }

    /// Why the server that was started here is gone, if it is; better than the error of a request.
    pub fn failure(&mut self) -> Option<CliError> {
        self.server.as_mut()?.failure()
    }

    /// Ends the server if it was started here.
    pub fn close(self) {
        if let Some(server) = self.server {
            server.stop();
        }
    }
}

/// Names of the models; none if the server has no such list and a `name_is_known` without it.
async fn served_models(client: &Client, name_is_known: bool) -> Result<Vec<String>> {
    let internal = CliError::with(ExitCode::Internal);
    let answer = client.get("/v1/models").await.map_err(&internal)?;
    if !answer.is_success() {
        return match name_is_known && answer.status == 404 {
            true => Ok(Vec::new()),
            false => Err(internal_refusal(client, &answer.refusal().to_string())),
        };
    }
    let json: Value = serde_json::from_slice(&answer.body)
        .map_err(|e| internal_refusal(client, &format!("it is not JSON ({e})")))?;
    let models = json["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    Ok(models.iter().filter_map(|model| Some(model["id"].as_str()?.to_owned())).collect())
}

fn internal_refusal(client: &Client, reason: &str) -> CliError {
    CliError::new(
        ExitCode::Internal,
        format!("{}/v1/models does not list the models: {reason}", client.base()),
    )
}

/// The model to ask for.
fn choose(base: &str, served: &[String], asked: Option<&str>) -> Result<String> {
    let refuse = |text: String| Err(CliError::new(ExitCode::Flags, text));
    match (asked, served) {
        (Some(name), []) => Ok(name.to_owned()),
        (Some(name), _) if served.iter().any(|model| model == name) => Ok(name.to_owned()),
        (Some(name), _) => refuse(format!("{base} has no model {name:?}; it serves {}", served.join(", "))),
        (None, [only]) => Ok(only.clone()),
        (None, []) => refuse(format!("{base} lists no model; name one with --model")),
        (None, _) => refuse(format!(
            "{base} serves {} models; choose one with --model: {}",
            served.len(),
            served.join(", ")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_the_only_one_or_the_one_asked_for() {
        let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let pick = |served: &[&str], asked| choose("http://h", &names(served), asked).map_err(|e| e.message);
        assert_eq!(pick(&["a"], None).unwrap(), "a");
        assert_eq!(pick(&["a", "b"], Some("b")).unwrap(), "b");
        assert_eq!(pick(&[], Some("b")).unwrap(), "b");
        assert!(pick(&["a"], Some("b")).unwrap_err().contains("serves a"));
        assert!(pick(&["a", "b"], None).unwrap_err().contains("--model: a, b"));
        assert!(pick(&[], None).unwrap_err().contains("--model"));
    }
}
