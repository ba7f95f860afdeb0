//! Sharding as data: what a layer says about each of its weights.
//!
//! A [`WeightRule`] names the stored tensors (or runs of their rows) that are joined into one
//! parameter and how each is cut. The layers of the `model` crate state one rule per parameter; the
//! loader, the check that every parameter was filled once, the memory accounting and the table in
//! `docs/sharding.md` all derive from it.

use super::{HeadShard, VocabShard, even, leaf_bounds};
use crate::{CODE_GROUP, DType, ParallelInfo, WeightType};
use std::ops::Range;

/// How rows (outputs) are divided over a TP group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowCut {
    /// Every rank holds all rows.
    Replicated,
    /// Equal runs.
    Even,
    /// Whole query heads.
    QueryHeads {
        /// Rows per head.
        head_dim: usize,
    },
    /// Whole KV heads; each held by several ranks when there are more ranks than heads.
    KvHeads {
        /// Rows per head.
        head_dim: usize,
    },
    /// Equal runs of the vocabulary after padding; padding rows exist on the rank only.
    Vocabulary,
}

impl RowCut {
    /// This rank's part of `0..rows`. Panics when the tp size is illegal.
    pub fn local(self, rows: usize, p: ParallelInfo) -> Range<usize> {
        match self {
            RowCut::Replicated => 0..rows,
            RowCut::Even => even(rows, p.tp_rank, p.tp_size),
            RowCut::QueryHeads { head_dim } => {
                let heads = even(rows / head_dim, p.tp_rank, p.tp_size);
                heads.start * head_dim..heads.end * head_dim
            }
            RowCut::KvHeads { head_dim } => {
                let heads = HeadShard::kv_heads(rows / head_dim, p.tp_rank, p.tp_size);
                heads.start * head_dim..heads.end * head_dim
            }
            RowCut::Vocabulary => VocabShard::new(rows, p.tp_rank, p.tp_size).real,
        }
    }

    /// Whether `rows` can be cut over `tp_size` ranks.
    pub fn is_legal(self, rows: usize, tp_size: usize) -> bool {
        match self {
            RowCut::Replicated | RowCut::Vocabulary => true,
            RowCut::Even => rows.is_multiple_of(tp_size),
            RowCut::QueryHeads { head_dim } => (rows / head_dim).is_multiple_of(tp_size),
            RowCut::KvHeads { head_dim } => {
                let heads = rows / head_dim;
                heads.is_multiple_of(tp_size) || tp_size.is_multiple_of(heads)
            }
        }
    }

    /// How many ranks hold the same rows.
    fn holders(self, rows: usize, tp_size: usize) -> usize {
        match self {
            RowCut::Replicated => tp_size,
            RowCut::KvHeads { head_dim } => (tp_size / (rows / head_dim)).max(1),
            RowCut::Even | RowCut::QueryHeads { .. } | RowCut::Vocabulary => 1,
        }
    }

    /// As in the table of `docs/sharding.md`.
    pub const fn words(self) -> &'static str {
        match self {
            RowCut::Replicated => "replicated",
            RowCut::Even => "rows, evenly",
            RowCut::QueryHeads { .. } => "rows, by query heads",
            RowCut::KvHeads { .. } => "rows, by KV heads",
            RowCut::Vocabulary => "rows, by padded vocabulary",
        }
    }
}

/// Columns (inputs) of a matrix, and whether they are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns {
    /// Over all ranks.
    pub global_len: usize,
    /// Equal runs per rank (row-parallel: partial sums are reduced afterwards), or all columns on
    /// every rank.
    pub cut: bool,
}

impl Columns {
    /// Columns of a rank at this tp size, rounded down where it cannot cut them.
    fn local_len(self, tp_size: usize) -> usize {
        if self.cut { self.global_len / tp_size } else { self.global_len }
    }
}

/// A run of rows of one stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Hugging Face name, with `.weight` or `.bias`.
    pub tensor: String,
    /// Rows of the whole stored tensor, which may hold several projections fused.
    pub tensor_rows: usize,
    /// This projection's rows of it.
    pub rows: Range<usize>,
    /// How those rows are divided.
    pub cut: RowCut,
}

impl Piece {
    /// A tensor that is one projection of `rows` rows.
    pub fn whole(tensor: impl Into<String>, rows: usize, cut: RowCut) -> Self {
        Self { tensor: tensor.into(), tensor_rows: rows, rows: 0..rows, cut }
    }

    /// This rank's rows, as rows of the stored tensor. Panics when the tp size is illegal.
    pub fn local_rows(&self, p: ParallelInfo) -> Range<usize> {
        let local = self.cut.local(self.rows.len(), p);
        self.rows.start + local.start..self.rows.start + local.end
    }
}

/// What a weight is counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// Embedding and untied head.
    Vocabulary,
    /// q, k, v and output projections.
    Attention,
    /// Dense gate, up and down projections.
    Mlp,
    /// The experts' gate, up and down projections.
    Experts,
    /// The matrices that choose experts.
    Router,
    /// Biases, f32.
    Biases,
    /// Norm weights, f32.
    Norms,
}

/// One parameter of a layer: pieces joined by rows, and how they are cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightRule {
    /// What it is counted as.
    pub group: Group,
    /// In row order; a fused projection has several.
    pub pieces: Vec<Piece>,
    /// Columns of every piece; `None` for a vector.
    pub columns: Option<Columns>,
}

/// One rank's part of a matrix rule, beside the rows of its pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalMatrix {
    /// Rows of all pieces together.
    pub rows: usize,
    /// Zero rows after them (vocabulary padding).
    pub padding_rows: usize,
    /// Columns of this rank.
    pub columns: Range<usize>,
    /// Order of the sum over them, [`leaf_bounds`].
    pub leaves: Vec<usize>,
}

impl WeightRule {
    /// A vector of one whole tensor.
    pub fn vector(group: Group, tensor: impl Into<String>, len: usize, cut: RowCut) -> Self {
        Self { group, pieces: vec![Piece::whole(tensor, len, cut)], columns: None }
    }

    /// A matrix.
    pub fn matrix(group: Group, pieces: Vec<Piece>, columns: Columns) -> Self {
        Self { group, pieces, columns: Some(columns) }
    }

    /// Shape of a piece's whole stored tensor.
    pub fn stored_shape(&self, piece: &Piece) -> Vec<usize> {
        match self.columns {
            Some(columns) => vec![piece.tensor_rows, columns.global_len],
            None => vec![piece.tensor_rows],
        }
    }

    /// This rank's part of a matrix kept as `weight_type`; `None` for a vector. Leaves of codes are whole groups.
    /// Panics when the tp size is illegal.
    pub fn local_matrix(&self, p: ParallelInfo, weight_type: WeightType) -> Option<LocalMatrix> {
        let block = match weight_type {
            WeightType::Float(_) => 1,
            WeightType::Coded(_) => CODE_GROUP,
        };
        let columns = self.columns?;
        let (local, leaves) = match columns.cut {
            true => (
                even(columns.global_len, p.tp_rank, p.tp_size),
                leaf_bounds(columns.global_len, block, p.tp_rank, p.tp_size),
            ),
            false => (0..columns.global_len, vec![0, columns.global_len]),
        };
        Some(LocalMatrix {
            rows: self.local_rows(p),
            padding_rows: self.pieces.iter().map(|piece| padding_rows(piece, p)).sum(),
            columns: local,
            leaves,
        })
    }

    /// Elements that this rank reads and keeps, padding left out. Panics when the tp size is illegal.
    pub fn local_elements(&self, p: ParallelInfo) -> usize {
        self.local_rows(p) * self.local_columns(p)
    }

    /// Those of [`local_elements`](Self::local_elements) that other ranks hold too.
    pub fn replicated_elements(&self, p: ParallelInfo) -> usize {
        if self.columns.is_some_and(|columns| columns.cut) {
            return 0;
        }
        let shared = |piece: &&Piece| piece.cut.holders(piece.rows.len(), p.tp_size) > 1;
        let rows: usize = self.pieces.iter().filter(shared).map(|piece| piece.local_rows(p).len()).sum();
        rows * self.local_columns(p)
    }

    /// Whether `tp_size` ranks can share this weight.
    pub fn is_legal(&self, tp_size: usize) -> bool {
        let columns =
            self.columns.is_none_or(|columns| !columns.cut || columns.global_len.is_multiple_of(tp_size));
        columns && self.pieces.iter().all(|piece| piece.cut.is_legal(piece.rows.len(), tp_size))
    }

    /// The form in which the parameter is kept: f32 for a vector; for a matrix that of its pieces, or what holds
    /// them all, where they differ. `type_of` gives the form of a tensor by what it counts as and its name; `exact_sizes` are the tp sizes
    /// that owe each other equal bits ([`exact_tp_sizes`](super::exact_tp_sizes)).
    ///
    /// Codes need columns in whole groups on every rank. Where some tp size cuts through a group the matrix is
    /// kept as floats at all sizes, so that all give the same answers.
    pub fn weight_type(
        &self,
        p: ParallelInfo,
        exact_sizes: &[usize],
        type_of: impl Fn(Group, &str) -> Option<WeightType>,
    ) -> WeightType {
        let Some(columns) = self.columns else { return DType::F32.into() };
        let types = self.pieces.iter().filter_map(|piece| type_of(self.group, &piece.tensor));
        let whole_groups = |size: &usize| columns.local_len(*size).is_multiple_of(CODE_GROUP);
        let fit = exact_sizes.iter().chain([&p.tp_size]).all(whole_groups);
        let joined = types.reduce(|a, b| match (a, b) {
            (WeightType::Coded(a), WeightType::Coded(b)) => WeightType::Coded(a.join(b)),
            (a, b) if a.as_float() == b.as_float() => a.as_float().into(),
            _ => DType::F32.into(),
        });
        match joined {
            Some(WeightType::Coded(_)) if !fit => DType::Bf16.into(),
            joined => joined.unwrap_or(DType::F32.into()),
        }
    }

    /// How a piece is cut, as in the table of `docs/sharding.md`.
    pub fn cut_in_words(&self, piece: &Piece) -> &'static str {
        match self.columns {
            Some(Columns { cut: true, .. }) => "columns, evenly; sums reduced",
            _ => piece.cut.words(),
        }
    }

    fn local_rows(&self, p: ParallelInfo) -> usize {
        self.pieces.iter().map(|piece| piece.local_rows(p).len()).sum()
    }

    fn local_columns(&self, p: ParallelInfo) -> usize {
        match self.columns {
            Some(Columns { global_len, cut: true }) => even(global_len, p.tp_rank, p.tp_size).len(),
            Some(Columns { global_len, cut: false }) => global_len,
            None => 1,
        }
    }
}

fn padding_rows(piece: &Piece, p: ParallelInfo) -> usize {
    match piece.cut {
        RowCut::Vocabulary => {
            let shard = VocabShard::new(piece.rows.len(), p.tp_rank, p.tp_size);
            shard.padded.len() - shard.real.len()
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CodeLayout;

    fn rank(tp_rank: usize, tp_size: usize) -> ParallelInfo {
        ParallelInfo::tensor_parallel(tp_rank, tp_size)
    }

    /// q|k|v stored as one tensor: 4 query and 2 KV heads of 8 rows.
    fn fused() -> WeightRule {
        let piece = |rows: Range<usize>, cut| Piece { tensor: "qkv".into(), tensor_rows: 64, rows, cut };
        let pieces = vec![
            piece(0..32, RowCut::QueryHeads { head_dim: 8 }),
            piece(32..48, RowCut::KvHeads { head_dim: 8 }),
            piece(48..64, RowCut::KvHeads { head_dim: 8 }),
        ];
        WeightRule::matrix(Group::Attention, pieces, Columns { global_len: 10, cut: false })
    }

    #[test]
    fn fused_tensors_are_sliced_per_projection() {
        let rows = |p| fused().pieces.iter().map(|piece| piece.local_rows(p)).collect::<Vec<_>>();
        assert_eq!(rows(rank(1, 2)), [16..32, 40..48, 56..64]);
        assert_eq!(rows(rank(2, 4)), [16..24, 40..48, 56..64]);
        assert_eq!(fused().local_elements(rank(2, 4)), 240);
        // At tp 4 two ranks hold each KV head.
        assert_eq!(
            (fused().replicated_elements(rank(2, 4)), fused().replicated_elements(rank(1, 2))),
            (160, 0)
        );
        assert!(fused().is_legal(4) && !fused().is_legal(3) && !fused().is_legal(8));
    }

    #[test]
    fn vocabulary_is_padded_and_columns_have_leaves() {
        let piece = Piece::whole("head", 321, RowCut::Vocabulary);
        let head = WeightRule::matrix(Group::Vocabulary, vec![piece], Columns { global_len: 4, cut: false });
        let local = head.local_matrix(rank(1, 2), DType::F32.into()).unwrap();
        assert_eq!((local.rows, local.padding_rows, local.columns), (160, 1, 0..4));
        let piece = Piece::whole("down", 4, RowCut::Replicated);
        let down = WeightRule::matrix(Group::Mlp, vec![piece], Columns { global_len: 96, cut: true });
        let local = down.local_matrix(rank(1, 4), DType::F32.into()).unwrap();
        assert_eq!((local.columns, local.leaves), (24..48, vec![0, 12, 24]));
        assert_eq!((down.replicated_elements(rank(1, 4)), down.local_elements(rank(1, 4))), (0, 96));
    }

    #[test]
    fn fused_parts_of_two_types_become_what_holds_both() {
        let mut rule = fused();
        rule.columns = Some(Columns { global_len: 64, cut: false });
        rule.pieces[1].tensor = "k".into();
        let of = |rule: &WeightRule, k: WeightType, others: WeightType| {
            rule.weight_type(rank(0, 1), &[1, 2], |_, t| Some(if t == "k" { k } else { others }))
        };
        let (f32, f16, bf16) = (DType::F32.into(), DType::F16.into(), DType::Bf16.into());
        assert_eq!(of(&rule, bf16, bf16), bf16);
        assert_eq!(of(&rule, f16, bf16), f32);
        let codes = |highest| WeightType::Coded(CodeLayout::new(0, highest, true, false));
        assert_eq!(of(&rule, codes(31), codes(15)), codes(31));
        assert_eq!(of(&rule, codes(31), bf16), bf16);
        assert_eq!(of(&rule, codes(31), f16), f32);
        rule.columns = Some(Columns { global_len: 80, cut: false });
        assert_eq!(of(&rule, codes(15), codes(15)), bf16, "not whole groups");
        let bias = WeightRule::vector(Group::Biases, "b", 8, RowCut::Even);
        assert_eq!(of(&bias, bf16, bf16), f32);
    }

    #[test]
    fn codes_are_kept_where_no_tp_size_cuts_a_group_and_leaves_are_whole_groups() {
        let codes = WeightType::Coded(CodeLayout::new(-8, 7, false, false));
        let piece = Piece::whole("down", 4, RowCut::Replicated);
        let down = WeightRule::matrix(Group::Mlp, vec![piece], Columns { global_len: 192, cut: true });
        let of = |p, sizes: &[usize]| down.weight_type(p, sizes, |_, _| Some(codes));
        assert_eq!(of(rank(0, 1), &[1, 2]), codes);
        assert_eq!(of(rank(0, 3), &[1, 2]), codes);
        assert_eq!(of(rank(0, 1), &[1, 2, 4]), DType::Bf16.into(), "tp 4 would cut 48 columns");
        assert_eq!(of(rank(0, 4), &[1, 2]), DType::Bf16.into());
        let local = down.local_matrix(rank(1, 2), codes).unwrap();
        assert_eq!((local.columns, local.leaves), (96..192, vec![0, 0, 32, 64, 96]));
    }
}
