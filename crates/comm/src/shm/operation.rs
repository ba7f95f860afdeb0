//! The operations of a process group and of a collective, by number and by name.

/// What a rank does in its process group or collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    /// No operation yet.
    None = 0,
    /// [`crate::ProcessGroup::barrier`].
    Barrier = 1,
    /// [`crate::ProcessGroup::broadcast`].
    Broadcast = 2,
    /// `all_gather` of either trait.
    AllGather = 3,
    /// [`crate::Collective::all_reduce`].
    AllReduce = 4,
    /// [`crate::Collective::send`].
    Send = 5,
    /// [`crate::Collective::recv`].
    Recv = 6,
}

impl Operation {
    /// The method's name.
    pub const fn name(self) -> &'static str {
        match self {
            Operation::None => "no operation",
            Operation::Barrier => "barrier",
            Operation::Broadcast => "broadcast",
            Operation::AllGather => "all_gather",
            Operation::AllReduce => "all_reduce",
            Operation::Send => "send",
            Operation::Recv => "recv",
        }
    }

    /// The operation with number `code`; unknown numbers (damaged memory) read as none.
    pub const fn from_code(code: u8) -> Self {
        match code {
            1 => Operation::Barrier,
            2 => Operation::Broadcast,
            3 => Operation::AllGather,
            4 => Operation::AllReduce,
            5 => Operation::Send,
            6 => Operation::Recv,
            _ => Operation::None,
        }
    }
}
