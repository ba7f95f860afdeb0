//! Placement on machines that are made up: folders laid out as `/sys/devices/system`.
#![allow(clippy::unwrap_used)] // tests may unwrap

use lockstep_backend::cpu::numa::{Allowed, Nodes, NumaChoice, Placement, threads_of};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A machine that exists as long as its folder.
struct Machine(PathBuf);

impl Machine {
    /// Nodes as (number, cores, MiB), of a machine whose cores `online` are.
    fn new(online: &str, nodes: &[(usize, &str, u64)]) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("lockstep-numa-{}-{count}", std::process::id()));
        let write = |path: &str, text: String| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("cpu/online", format!("{online}\n"));
        // What is no node, as on real machines.
        write("node/possible", "0-3\n".into());
        write("node/power/control", "auto\n".into());
        for (number, cores, mib) in nodes {
            write(&format!("node/node{number}/cpulist"), format!("{cores}\n"));
            let kib = mib * 1024;
            let text = format!("Node {number} MemTotal:       {kib} kB\nNode {number} MemFree:  12 kB\n");
            write(&format!("node/node{number}/meminfo"), text);
        }
        Self(root)
    }

    fn nodes(&self, allowed: &Allowed) -> Nodes {
        Nodes::read(&self.0, allowed)
    }

    /// All of it.
    fn whole(&self) -> Nodes {
        self.nodes(&Allowed::default())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn two_sockets() -> Machine {
    // Hyperthreads of a core have numbers far apart.
    Machine::new("0-15", &[(0, "0-3,8-11", 65_536), (1, "4-7,12-15", 65_536)])
}

fn allowed(cores: &[usize], memory_nodes: Option<&[usize]>) -> Allowed {
    Allowed {
        cores: Some(cores.iter().copied().collect()),
        memory_nodes: memory_nodes.map(|nodes| nodes.iter().copied().collect()),
    }
}

fn nodes_of(placed: &Option<Vec<Placement>>) -> Option<Vec<usize>> {
    placed.as_ref().map(|ranks| ranks.iter().map(|rank| rank.node).collect())
}

/// Where auto puts so many ranks.
fn auto(nodes: &Nodes, ranks: usize) -> Option<Vec<usize>> {
    nodes_of(&nodes.place(&NumaChoice::Auto, ranks).unwrap())
}

fn refused(nodes: &Nodes, choice: &str, ranks: usize) -> String {
    nodes.place(&choice.parse().unwrap(), ranks).unwrap_err().to_string()
}

#[test]
fn two_nodes_get_a_rank_or_more_each() {
    let nodes = two_sockets().whole();
    assert_eq!(nodes.to_string(), "0 (cores 0-3,8-11, 64.0 GiB), 1 (cores 4-7,12-15, 64.0 GiB)");
    // One rank would leave half the machine idle.
    assert_eq!(auto(&nodes, 1), None);
    assert_eq!(auto(&nodes, 2), Some(vec![0, 1]));
    assert_eq!(auto(&nodes, 3), Some(vec![0, 0, 1]));
    assert_eq!(auto(&nodes, 4), Some(vec![0, 0, 1, 1]));
    let placed = nodes.place(&NumaChoice::Auto, 2).unwrap().unwrap();
    assert_eq!(placed[1].cores, [4, 5, 6, 7, 12, 13, 14, 15]);
    assert_eq!(placed[1].describe(), "node 1 (cores 4-7,12-15)");
    assert_eq!(nodes.place(&NumaChoice::Off, 2), Ok(None));
}

#[test]
fn ranks_of_a_node_share_its_cores_and_none_gets_more_threads_than_another() {
    let nodes = two_sockets().whole();
    let threads =
        |choice: &str, ranks| threads_of(&nodes.place(&choice.parse().unwrap(), ranks).unwrap().unwrap());
    assert_eq!((threads("auto", 2), threads("auto", 4)), (8, 4));
    assert_eq!((threads("auto", 3), threads("0,0", 2), threads("1", 1)), (4, 4, 8));
    assert_eq!(threads("0,0,0,0,0,0,0,0,0", 9), 1);
}

#[test]
fn what_is_asked_for_is_done_or_refused_in_a_sentence() {
    let nodes = two_sockets().whole();
    let placed = nodes.place(&"1,0".parse().unwrap(), 2).unwrap();
    assert_eq!(nodes_of(&placed), Some(vec![1, 0]));
    assert!(refused(&nodes, "0", 2).contains("names 1 nodes for 2 ranks"));
    let missing = refused(&nodes, "0,7", 2);
    assert_eq!(missing, "--numa names node 7, which this machine does not have; use 0, 1, auto, or off");
    for wrong in ["", "on", "0,", "0,x", "-1", "0;1", "99999999"] {
        let error = wrong.parse::<NumaChoice>().unwrap_err().to_string();
        assert!(error.contains("auto, off, or a node for each rank"), "{error}");
    }
}

#[test]
fn nodes_without_memory_or_cores_are_left_out() {
    // A socket without DIMMs, and memory without cores, as CXL expanders show it.
    let machine = Machine::new("0-11", &[(0, "0-3", 1024), (1, "4-7", 0), (2, "8-11", 1024), (3, "", 4096)]);
    let nodes = machine.whole();
    assert_eq!(auto(&nodes, 2), Some(vec![0, 2]));
    assert!(refused(&nodes, "1", 1).contains("node 1, which has no memory"));
    assert!(refused(&nodes, "3", 1).contains("node 3, which has no core"));
    assert!(refused(&nodes, "3", 1).ends_with("use 0, 2, auto, or off"));
    assert!(nodes.to_string().contains("1 (cores 4-7, no memory), 2"));
}

#[test]
fn cores_that_are_offline_or_not_allowed_do_not_count() {
    let machine = two_sockets();
    // The affinity mask of a container: four cores of node 0 and two of node 1.
    let part = machine.nodes(&allowed(&[0, 1, 2, 3, 4, 12], None));
    let placed = part.place(&NumaChoice::Auto, 2).unwrap().unwrap();
    assert_eq!((&placed[0].cores[..], &placed[1].cores[..]), (&[0, 1, 2, 3][..], &[4, 12][..]));
    assert_eq!(threads_of(&placed), 2);
    // All of it on one node: there is nothing to choose, and the other is refused.
    let one = machine.nodes(&allowed(&[0, 1], None));
    assert_eq!(auto(&one, 2), None);
    assert!(refused(&one, "0,1", 2).contains("node 1, which has no core that this process may use"));
    // The cores of both, the memory of one.
    let memory = machine.nodes(&allowed(&[0, 1, 4, 5], Some(&[1])));
    assert_eq!(auto(&memory, 2), None);
    assert!(refused(&memory, "0", 1).contains("no memory that this process may use"));
    // Offline cores may still be listed for a node.
    let offline = Machine::new("0-3,5", &[(0, "0-3", 1024), (1, "4-7", 1024)]).whole();
    assert_eq!(offline.place(&NumaChoice::Auto, 2).unwrap().unwrap()[1].cores, [5]);
}

#[test]
fn a_machine_of_one_node_or_of_none_is_left_alone() {
    let one = Machine::new("0-1", &[(0, "0-1", 24_576)]).whole();
    assert_eq!((auto(&one, 1), auto(&one, 2)), (None, None));
    assert_eq!(nodes_of(&one.place(&"0,0".parse().unwrap(), 2).unwrap()), Some(vec![0, 0]));
    // A kernel without NUMA has no such folder, and files may be damaged.
    let none = Machine::new("0-1", &[]).whole();
    assert_eq!((auto(&none, 2), none.to_string()), (None, "none known to this kernel".into()));
    assert!(refused(&none, "0", 1).contains("use --numa off"));
    let damaged = Machine::new("x", &[(0, "0-zz", 1024), (1, "5-99999999999", 1024)]).whole();
    assert_eq!(auto(&damaged, 2), None);
}

/// On whatever machine the tests run: a thread that binds itself to the first usable node runs there, and so do
/// the threads that it starts.
#[test]
fn a_bound_thread_keeps_to_its_cores_and_so_do_those_it_starts() {
    let nodes = Nodes::of_this_machine();
    let Some(node) = nodes.iter().find(|node| !node.cores.is_empty() && node.memory_bytes > 0) else {
        return eprintln!("skipped: this kernel shows no NUMA nodes");
    };
    // One core of it, so that the mask differs from this thread's wherever there are several.
    let placement = Placement { node: node.number, cores: node.cores[..1].to_vec() };
    let masks = std::thread::spawn(move || {
        placement.bind();
        let mask = || Allowed::of_this_process().cores.unwrap().into_iter().collect::<Vec<_>>();
        (mask(), std::thread::spawn(mask).join().unwrap())
    });
    let (own, inherited) = masks.join().unwrap();
    assert_eq!((&own[..], &inherited[..]), (&node.cores[..1], &node.cores[..1]));
}
