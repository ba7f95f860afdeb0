//! The server's life: listen, serve, drain or fail, flush, return.

use crate::{ApiConfig, ApiError, Ended, EngineClient, ServerControl};
use lockstep_core::Refusal;
use tokio::net::TcpListener;

/// Serves HTTP on `listener` until `control` ends it.
pub async fn serve(
    _listener: TcpListener,
    _config: ApiConfig,
    engine: EngineClient,
    mut control: ServerControl,
) -> Result<Ended, ApiError> {
    control.changed().await;
    engine.close(Refusal::unavailable("stopping"));
    Ok(Ended::Failed)
}
