//! NUMA nodes of this machine, and which rank runs on which.
//!
//! Memory of another node is read at a fraction of the rate of the own one, so a rank keeps to a node: its threads run on the
//! node's cores, and what they touch first (weights while packing, KV pages when they are used, activations) is
//! allocated there. The choice is a pure function of what `/sys` says and of what this process may use; [`Placement::bind`]
//! carries it out.
//!
//! Read by the launcher, which places all ranks of its host; each rank binds itself before it starts threads or maps memory.
//!
//! Source: Linux, `Documentation/ABI/stable/sysfs-devices-node`, `set_mempolicy(2)`.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// Where the kernel describes the machine.
const SYSTEM: &str = "/sys/devices/system";
/// Highest number of a core or node that is believed.
const NUMBER_MAX: usize = 1 << 16;

/// Why ranks cannot be placed as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NumaError(String);

/// `--numa`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NumaChoice {
    /// A node for each rank where there are several nodes and at least as many ranks.
    Auto,
    /// Wherever the system likes.
    Off,
    /// The node of each rank.
    Nodes(Vec<usize>),
}

/// A node, as far as this process may use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// As the kernel numbers it.
    pub number: usize,
    /// Cores that are online and allowed, ascending.
    pub cores: Vec<usize>,
    /// Memory of the node, 0 where there is none or none is allowed.
    pub memory_bytes: u64,
}

impl Node {
    /// Whether a rank can be there.
    pub fn is_usable(&self) -> bool {
        !self.cores.is_empty() && self.memory_bytes > 0
    }
}

/// Where a rank runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The node.
    pub node: usize,
    /// Cores of the node that its threads may run on; ranks of one node share them.
    pub cores: Vec<usize>,
}

/// What this process may use.
#[derive(Clone, Debug, Default)]
pub struct Allowed {
    /// Cores (affinity mask, control group); `None`: all.
    pub cores: Option<BTreeSet<usize>>,
    /// Nodes whose memory may be used; `None`: all.
    pub memory_nodes: Option<BTreeSet<usize>>,
}

impl Allowed {
    /// As the kernel tells this process.
    pub fn of_this_process() -> Self {
        let cores = sched_getaffinity(None)
            .ok()
            .map(|set| (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect());
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let list = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"));
        Self { cores, memory_nodes: list.and_then(numbers) }
    }
}

/// The nodes of a machine, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes(Vec<Node>);

impl Nodes {
    /// Those of this machine; none on a kernel that does not know of nodes.
    pub fn of_this_machine() -> Self {
        Self::read(Path::new(SYSTEM), &Allowed::of_this_process())
    }

    /// Those that the folder `system` describes, laid out as `/sys/devices/system`.
    pub fn read(system: &Path, allowed: &Allowed) -> Self {
        let list = |path: &Path| std::fs::read_to_string(path).ok().as_deref().and_then(numbers);
        let online = list(&system.join("cpu/online"));
        let entries = std::fs::read_dir(system.join("node")).into_iter().flatten().flatten();
        let mut nodes: Vec<Node> = entries
            .filter_map(|entry| {
                let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
                let cores = list(&entry.path().join("cpulist")).unwrap_or_default();
                let may_run = |core: &usize| {
                    let is_in =
                        |set: &Option<BTreeSet<usize>>| set.as_ref().is_none_or(|set| set.contains(core));
                    is_in(&online) && is_in(&allowed.cores)
                };
                let has_memory = allowed.memory_nodes.as_ref().is_none_or(|nodes| nodes.contains(&number));
                let memory_bytes = if has_memory { memory_bytes(&entry.path()) } else { 0 };
                Some(Node { number, cores: cores.into_iter().filter(may_run).collect(), memory_bytes })
            })
            .collect();
        nodes.sort_by_key(|node| node.number);
        Self(nodes)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Node> {
        self.0.iter()
    }

    /// The node of each of `ranks` ranks of this host; `None` where they are not placed.
    ///
    /// Auto: nodes that have cores and memory for this process get equally many consecutive ranks, so that ranks that share
    /// layers are near each other. With one such node there is nothing to choose; with fewer ranks than nodes, a rank kept
    /// to one node would leave others idle.
    ///
    /// Errors, in one sentence, when the nodes asked for are not one a rank, or one of them cannot be used.
    pub fn place(&self, choice: &NumaChoice, ranks: usize) -> Result<Option<Vec<Placement>>, NumaError> {
        let placed = |node: &Node| Placement { node: node.number, cores: node.cores.clone() };
        match choice {
            NumaChoice::Off => Ok(None),
            NumaChoice::Auto => {
                let usable: Vec<&Node> = self.0.iter().filter(|node| node.is_usable()).collect();
                if usable.len() < 2 || ranks < usable.len() {
                    return Ok(None);
                }
                Ok(Some((0..ranks).map(|rank| placed(usable[rank * usable.len() / ranks])).collect()))
            }
            NumaChoice::Nodes(numbers) if numbers.len() != ranks => Err(NumaError(format!(
                "--numa names {} nodes for {ranks} ranks of this host; give one for each rank, auto, or off",
                numbers.len()
            ))),
            NumaChoice::Nodes(numbers) => numbers
                .iter()
                .map(|number| self.usable(*number).map(placed))
                .collect::<Result<_, _>>()
                .map(Some),
        }
    }

    /// The node of this number, or why ranks cannot be there.
    fn usable(&self, number: usize) -> Result<&Node, NumaError> {
        let ways_out = || {
            let usable: Vec<String> =
                self.0.iter().filter(|n| n.is_usable()).map(|n| n.number.to_string()).collect();
            match usable.is_empty() {
                true => "this kernel shows none that can; use --numa off".to_owned(),
                false => format!("use {}, auto, or off", usable.join(", ")),
            }
        };
        let why = match self.0.iter().find(|node| node.number == number) {
            None => "this machine does not have",
            Some(node) if node.cores.is_empty() => "has no core that this process may use",
            Some(node) if node.memory_bytes == 0 => "has no memory that this process may use",
            Some(node) => return Ok(node),
        };
        Err(NumaError(format!("--numa names node {number}, which {why}; {}", ways_out())))
    }
}

impl fmt::Display for Nodes {
    /// Such as `0 (cores 0-15, 64 GiB), 1 (cores 16-31, 64 GiB)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none known to this kernel");
        }
        let node = |node: &Node| {
            let cores = match node.cores.is_empty() {
                true => "no core".into(),
                false => format!("cores {}", ranges(&node.cores)),
            };
            let memory = match node.memory_bytes {
                0 => "no memory".into(),
                bytes => format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64),
            };
            format!("{} ({cores}, {memory})", node.number)
        };
        f.write_str(&self.0.iter().map(node).collect::<Vec<_>>().join(", "))
    }
}

/// Threads of each rank where none are asked for: the cores of its node, shared by the ranks there; the fewest of all
/// ranks, which wait for each other.
pub fn threads_of(placements: &[Placement]) -> usize {
    let of = |placement: &Placement| {
        let sharers = placements.iter().filter(|other| other.node == placement.node).count();
        placement.cores.len() / sharers
    };
    placements.iter().map(of).min().unwrap_or(1).max(1)
}

impl Placement {
    /// Keeps the calling thread, and those that it starts from now on, to the node's cores, and prefers the node's memory
    /// for what they touch first. What the system refuses is logged: memory then still is where it is first touched.
    pub fn bind(&self) {
        let mut set = CpuSet::new();
        self.cores.iter().filter(|core| **core < CpuSet::MAX_CPU).for_each(|core| set.set(*core));
        if let Err(error) = sched_setaffinity(None, &set) {
            tracing::warn!(node = self.node, %error, "cannot keep to the cores of the NUMA node");
        }
        if let Err(error) = prefer_memory(self.node) {
            tracing::info!(node = self.node, %error, "cannot prefer the memory of the NUMA node; first touch decides");
        }
    }

    /// Such as `node 1 (cores 16-31)`.
    pub fn describe(&self) -> String {
        format!("node {} (cores {})", self.node, ranges(&self.cores))
    }
}

/// Prefers `node` for memory that this thread, and those it starts, touch first.
fn prefer_memory(node: usize) -> std::io::Result<()> {
    const MPOL_PREFERRED: libc::c_long = 1;
    const WORD_BITS: usize = u64::BITS as usize;
    let mut mask = vec![0_u64; node / WORD_BITS + 1];
    mask[node / WORD_BITS] |= 1 << (node % WORD_BITS);
    // The kernel reads one bit less than it is told.
    let bits = mask.len() * WORD_BITS + 1;
    // SAFETY: the mask is valid for `bits - 1` bits; the call changes nothing but this thread's policy.
    let done = unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_PREFERRED, mask.as_ptr(), bits) };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// `MemTotal` of a node's `meminfo`, whose lines begin with `Node 0 MemTotal:`.
fn memory_bytes(node: &Path) -> u64 {
    let text = std::fs::read_to_string(node.join("meminfo")).unwrap_or_default();
    let kib = text
        .lines()
        .find_map(|line| line.split_once("MemTotal:")?.1.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// The numbers of a list such as `0-3,8`; `None` when it is none.
fn numbers(list: &str) -> Option<BTreeSet<usize>> {
    let mut all = BTreeSet::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if last > NUMBER_MAX {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

/// The list of ascending numbers.
fn ranges(numbers: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => parts.push((number, number)),
        }
    }
    let part = |(first, last): &(usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    parts.iter().map(part).collect::<Vec<_>>().join(",")
}

impl std::str::FromStr for NumaChoice {
    type Err = NumaError;

    /// `auto`, `off`, or the node of each rank such as `0,1`.
    fn from_str(text: &str) -> Result<Self, NumaError> {
        let number = |part: &str| part.parse().ok().filter(|number| *number <= NUMBER_MAX);
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            list => list.split(',').map(number).collect::<Option<_>>().map(Self::Nodes).ok_or_else(|| {
                NumaError(format!(
                    "--numa {text} is not known; use auto, off, or a node for each rank such as 0,1"
                ))
            }),
        }
    }
}
