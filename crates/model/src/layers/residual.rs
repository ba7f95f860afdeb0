//! The end of a half layer: what attention or MLP computed joins the residual stream.

use super::norm::Norm;
use crate::Result;
use lockstep_backend::{Backend, ReduceAddNorm};
use lockstep_comm::collective::Collective;

/// The buffers that pass from one half layer to the next, `[tokens, hidden]` each.
pub struct ResidualStream<'a, B: Backend> {
    /// This rank's partial sums of the half layer's output.
    pub partial: &'a mut B::Tensor,
    /// The residual stream, updated.
    pub residual: &'a mut B::Tensor,
    /// Its norm: the input of the next half layer.
    pub normed: &'a mut B::Tensor,
}

/// How a half layer ends.
pub struct HalfLayerEnd<'a, B: Backend> {
    /// Added once to the reduced sum.
    pub bias: Option<&'a B::Vector>,
    /// Norm of the sum before it joins the stream (sandwich norms).
    pub output_norm: Option<&'a Norm<B>>,
    /// Norm that makes the input of the next half layer.
    pub next_norm: &'a Norm<B>,
}

impl<B: Backend> HalfLayerEnd<'_, B> {
    /// Reduces `stream.partial` over the TP group, adds it to the stream and norms the stream for the
    /// next half layer, as one operation, so that a device may fuse it.
    ///
    /// **Collective: all ranks of the TP group.**
    pub fn run(
        self,
        ctx: (&mut B, &dyn Collective),
        stream: &mut ResidualStream<'_, B>,
        rows: usize,
    ) -> Result<()> {
        let (backend, collective) = ctx;
        let args = ReduceAddNorm {
            bias: self.bias,
            post_norm: self.output_norm.map(|norm| &norm.weight),
            norm_weight: &self.next_norm.weight,
            norm_eps: self.next_norm.eps,
        };
        let streams = (&mut *stream.residual, &mut *stream.normed);
        Ok(backend.reduce_add_norm(collective, args, stream.partial, streams, rows)?)
    }
}
