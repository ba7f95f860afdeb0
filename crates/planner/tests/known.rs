//! Plans of public models against numbers worked out by hand from their configs.
#![allow(clippy::unwrap_used)] // tests may unwrap

use lockstep_core::config::hf;
use lockstep_core::{DType, ModelConfig};
use lockstep_planner::{DeviceTable, Facts, Link, Plan, PlanError, Workload};

fn config(name: &str) -> ModelConfig {
    let path = format!("{}/tests/configs/{name}.json", env!("CARGO_MANIFEST_DIR"));
    hf::parse(&std::fs::read(path).unwrap()).unwrap()
}

/// The plan for the device's usual load, changed.
fn changed(name: &str, device: &str, change: impl Fn(Workload) -> Workload) -> Result<Plan, PlanError> {
    let config = config(name);
    let device = DeviceTable::built_in().find(device).unwrap();
    let facts = Facts {
        config: &config,
        type_of: &|_, _| Some(DType::Bf16.into()),
        source: "bf16".into(),
        notes: Vec::new(),
    };
    let usual = Workload::default_for(device.kind, config.max_position);
    lockstep_planner::plan(&facts, &device, change(usual))
}

/// The plan for `concurrency` requests of `context` tokens.
fn planned(name: &str, device: &str, context: usize, concurrency: usize) -> Plan {
    changed(name, device, |load| Workload { context, concurrency, ..load }).unwrap()
}

fn legal(plan: &Plan) -> Vec<usize> {
    plan.choices.iter().filter(|c| c.illegal.is_none()).map(|c| c.tp_size).collect()
}

#[test]
fn parameters_weights_and_kv_of_public_models() {
    // name, parameters, legal tp sizes up to 16, bytes of KV a token at tp 1 (2 x layers x KV heads x head_dim x 2)
    let known = [
        ("qwen3-8b", 8_190_735_360, vec![1, 2, 4, 8, 16], 147_456),
        ("qwen3-14b", 14_768_307_200, vec![1, 2, 4, 8], 163_840),
        ("qwen3-32b", 32_762_123_264, vec![1, 2, 4, 8, 16], 262_144),
        ("qwen2.5-32b", 32_763_876_352, vec![1, 2, 4, 8], 262_144),
        ("qwen3-30b-a3b", 30_532_122_624, vec![1, 2, 4, 8, 16], 98_304),
        ("llama-3.1-70b", 70_553_706_496, vec![1, 2, 4, 8, 16], 327_680),
        ("llama-3.1-405b", 405_853_388_800, vec![1, 2, 4, 8, 16], 516_096),
    ];
    for (name, parameters, sizes, kv) in known {
        let plan = planned(name, "h200", 8192, 32);
        assert_eq!((plan.parameters, legal(&plan)), (parameters, sizes), "{name}");
        let memory = plan.choices[0].memory.unwrap();
        assert_eq!(memory.kv_bytes_per_token, kv, "{name}");
        // Matrices take 2 bytes, norms and biases 4: within a thousandth of 2 bytes a parameter.
        let plain = 2 * parameters;
        assert!((plain..plain + plain / 1000).contains(&memory.weight_bytes), "{name}: {memory:?}");
    }
}

/// Why a 32B model on one 80 GB card loads but may not serve, to the byte.
#[test]
fn qwen25_32b_on_one_a100_loads_but_does_not_serve() {
    let plan = planned("qwen2.5-32b", "a100-80g", 8192, 32);
    let memory = plan.choices[0].memory.unwrap();
    // See docs/sharding.md for the sum.
    assert_eq!(memory.weight_bytes, 65_529_991_168);
    assert_eq!(memory.budget_bytes, (79.2 * 0.9 * 1024.0 * 1024.0 * 1024.0) as u64);
    assert!(memory.loads() && !memory.serves(&plan.workload));
    let left = memory.budget_bytes - memory.committed_bytes();
    assert_eq!(memory.pages, left / (16 * 262_144));
    // 32 x 8192 tokens of 256 KiB are 64 GiB, which no card with 61 GiB of weights has left.
    assert!(
        plan.advice.iter().any(|s| s.starts_with("tp 1 loads but does not serve 32 requests of 8192 tokens")
            && s.contains("262144 (64.00 GiB at 256 KiB a token)")),
        "{:#?}",
        plan.advice
    );
    // Half the weights a rank, half the KV of a token: 32 of them fit on two.
    assert_eq!(plan.recommended, Some(2));
    assert!(plan.choices[1].memory.unwrap().concurrency_max >= 32);
}

/// Why twice the ranks halve neither memory nor time.
#[test]
fn doubling_tp_halves_neither_memory_nor_time() {
    let plan = planned("qwen2.5-32b", "h200", 8192, 32);
    for pair in plan.choices.windows(2).filter(|p| p[1].illegal.is_none() && p[0].illegal.is_none()) {
        let (a, b) = (pair[0].memory.unwrap(), pair[1].memory.unwrap());
        assert!(2 * b.committed_bytes() > a.committed_bytes());
        let own = |m: lockstep_planner::memory::RankMemory| m.buffer_bytes() - m.communication_bytes;
        assert!(b.replicated_bytes > 0 && own(a) == own(b) && b.communication_bytes > 0);
        let (a, b) = (pair[0].cost.unwrap(), pair[1].cost.unwrap());
        assert!(2.0 * b.decode_one_ms > a.decode_one_ms, "{a:?} {b:?}");
        assert_eq!(b.all_reduces_per_step, 2 * 64 + 1);
        assert_eq!(b.all_reduce_bytes_per_token, 5120 * 2);
    }
    let words = plan.advice.iter().find(|s| s.starts_with("tp 2 against tp 1")).unwrap();
    assert!(words.contains("are on every rank") && words.contains("129 all-reduces"), "{words}");
}

/// Decode steps of one request at 1,024 tokens, as measured on one and two H200s (docs/performance.md).
#[test]
fn decode_times_are_near_those_measured() {
    for (name, tp, measured_ms) in [
        ("qwen3-8b", 1, 4.69),
        ("qwen3-14b", 1, 8.62),
        ("qwen3-32b", 1, 17.2),
        ("qwen3-8b", 2, 2.96),
        ("qwen3-14b", 2, 4.77),
        ("qwen3-32b", 2, 9.76),
    ] {
        let plan = planned(name, "h200", 1024, 1);
        let choice = plan.choices.iter().find(|c| c.tp_size == tp).unwrap();
        let ratio = choice.cost.unwrap().decode_one_ms / measured_ms;
        assert!((0.9..1.1).contains(&ratio), "{name} at tp {tp}: {ratio} of {measured_ms} ms");
    }
}

/// Buffers are named one by one, and together with weights and activations are what is committed.
#[test]
fn what_is_no_kv_is_listed_by_kind() {
    let plan = planned("qwen3-8b", "h200", 8192, 32);
    let (one, two) = (plan.choices[0].memory.unwrap(), plan.choices[1].memory.unwrap());
    assert_eq!((one.communication_bytes, two.communication_bytes), (0, 1 << 29));
    for memory in [one, two] {
        let sum =
            memory.driver_bytes + memory.workspace_bytes + memory.graph_bytes + memory.communication_bytes;
        assert!(memory.workspace_bytes >= 32 << 20 && memory.graph_bytes > 0);
        assert_eq!(memory.committed_bytes(), memory.weight_bytes + memory.activation_bytes + sum);
    }
    let text = lockstep_planner::table::render(&plan);
    for row in ["driver GiB", "workspace GiB", "recorded steps (graphs) GiB", "communication GiB"] {
        assert!(text.lines().any(|line| line.starts_with(row)), "{row}\n{text}");
    }
}

/// The decode time of Qwen3-8B at batch 1 by hand: all weights but the input embedding over the bandwidth,
/// the KV of 1,024 tokens, 36 layers of launches.
#[test]
fn decode_time_of_qwen3_8b_by_hand() {
    let plan = planned("qwen3-8b", "h200", 1024, 1);
    let bytes = 2.0 * (8_190_735_360.0 - 151_936.0 * 4096.0) + 2.0 * 2.0 * (36.0 * 8448.0 + 4096.0) / 2.0;
    let kv = 1024.0 * 147_456.0;
    let by_hand = (bytes + kv) / 4200e9 * 1e3 + 36.0 * 28.0 / 1e3;
    let cost = plan.choices[0].cost.unwrap();
    assert!((cost.decode_one_ms - by_hand).abs() < 0.002 * by_hand, "{} {by_hand}", cost.decode_one_ms);
}

#[test]
fn experts_are_read_as_they_are_chosen() {
    let of =
        |requests| planned("qwen3-30b-a3b", "h200", 1024, requests).choices[0].cost.unwrap().decode_all_ms;
    // One token reads 8 of 128 experts: far below the 57 GiB; 256 tokens read nearly all.
    let all_ms = 2.0 * 30_532_122_624.0 / 4300e9 * 1e3;
    assert!(of(1) < 0.25 * all_ms, "{}", of(1));
    assert!(of(256) > all_ms, "{}", of(256));
    let plan = planned("qwen3-30b-a3b", "h200", 8192, 32);
    let eight = plan.choices.iter().find(|c| c.tp_size == 8).unwrap();
    assert_eq!(eight.memory.unwrap().kv_replicas, 2);
    assert!(
        plan.advice
            .iter()
            .any(|s| s.starts_with("tp 8: more ranks than KV heads, so 2 ranks hold each head"))
    );
}

#[test]
fn a_model_that_fits_nowhere_and_one_that_cannot_be_cut() {
    let plan = planned("llama-3.1-405b", "rtx4090", 8192, 32);
    assert_eq!(plan.recommended, None);
    assert!(plan.advice[0].starts_with("No tp size fits: nearest is tp 16"), "{}", plan.advice[0]);
    let mut config = config("qwen3-8b");
    (config.num_heads, config.num_kv_heads) = (6, 2);
    let device = DeviceTable::built_in().find("h200").unwrap();
    let facts = Facts {
        config: &config,
        type_of: &|_, _| Some(DType::Bf16.into()),
        source: String::new(),
        notes: Vec::new(),
    };
    let plan = lockstep_planner::plan(&facts, &device, Workload::default_for(device.kind, 40960)).unwrap();
    assert_eq!(legal(&plan), [1, 2, 6]);
    let four = plan.choices.iter().find(|c| c.tp_size == 4).unwrap();
    assert!(four.illegal.as_ref().unwrap().contains("6 query heads"));
    let text = lockstep_planner::table::render(&plan);
    assert!(text.contains("--tp 4 does not divide the model's 6 query heads"), "{text}");
}

#[test]
fn replicas_share_the_load_and_a_machine_but_no_gpus() {
    let of = |device: &str, replicas| {
        changed("qwen3-8b", device, |load| Workload { context: 4096, concurrency: 5, replicas, ..load })
            .unwrap()
    };
    let (alone, two) = (of("cpu:64g", 1), of("cpu:64g", 2));
    assert_eq!((two.workload.concurrency, two.device.memory_gib), (3, 32.0));
    let budget = |plan: &Plan| plan.choices[0].memory.unwrap().budget_bytes;
    assert_eq!(budget(&alone), 2 * budget(&two));
    let (alone, two) = (of("h200", 1), of("h200", 2));
    assert_eq!(budget(&alone), budget(&two));
    let text = lockstep_planner::table::render(&two);
    assert!(
        text.contains("replicas: 2 (dp 2)") && text.contains("- dp 2: 2 replicas of tp 1 are 2 ranks"),
        "{text}"
    );
}

#[test]
fn ranks_of_one_machine_share_it() {
    let plan = planned("qwen3-8b", "cpu:64g", 4096, 4);
    let (one, two) = (plan.choices[0].clone(), plan.choices[1].clone());
    assert_eq!(one.memory.unwrap().budget_bytes, 2 * two.memory.unwrap().budget_bytes);
    assert_eq!(one.memory.unwrap().kv_bytes_per_token, 2 * 147_456, "f32 KV");
    assert!(two.cost.unwrap().decode_one_ms >= one.cost.unwrap().decode_one_ms);
    assert!(
        plan.advice.iter().any(|s| s.starts_with("tp 2 will be no faster than tp 1")),
        "{:#?}",
        plan.advice
    );
}

#[test]
fn hosts_have_their_own_memory_and_send_what_crosses_them() {
    let of = |stages, hosts| {
        let change = |load| Workload { context: 4096, concurrency: 4, stages, hosts, ..load };
        changed("qwen3-8b", "cpu:64g", change).unwrap()
    };
    let at = |plan: &Plan, tp_size| plan.choices.iter().find(|c| c.tp_size == tp_size).unwrap().clone();
    let budget = |plan: &Plan, tp_size| at(plan, tp_size).memory.unwrap().budget_bytes;
    let (together, apart) = (of(1, 1), of(1, 2));
    assert!(at(&together, 2).hosts.is_none());
    assert_eq!(budget(&apart, 2), 2 * budget(&together, 2), "two ranks on a machine each");
    let refused = at(&apart, 1);
    assert!(refused.illegal.unwrap().contains("--nnodes 2 does not divide the 1 ranks of tp 1"));

    // tp across: 73 sums of 4096 f32, and every rank's half of 151,936 logits.
    let across = at(&apart, 2).hosts.unwrap();
    assert!(across.tp_crosses);
    assert_eq!(across.decode_one.bytes, (73 * 4096 * 4 + 151_936 / 2 * 4) as f64);
    assert_eq!((across.decode_one.rounds, across.decode_all.bytes), (74.0, 4.0 * across.decode_one.bytes));
    // A stage each: the residual stream once, in steps that share the requests.
    let staged = of(2, 2);
    let hop = at(&staged, 1).hosts.unwrap();
    assert!(!hop.tp_crosses);
    assert_eq!((hop.decode_one.bytes, hop.decode_one.rounds), (4096.0 * 4.0, 1.0));
    assert_eq!((hop.decode_all.bytes, hop.decode_all.rounds), (4.0 * 4096.0 * 4.0, 2.0));
    assert_eq!(hop.prefill_chunk.bytes, 512.0 * 4096.0 * 4.0);
    // What a link takes is part of a step; a slow one shows.
    let slow = |load: Workload| Workload { link: Link { gbit_s: 1.0, latency_us: 1000.0 }, ..load };
    let crossing = |load| Workload { context: 4096, concurrency: 4, hosts: 2, ..load };
    let slower = changed("qwen3-8b", "cpu:64g", |load| slow(crossing(load))).unwrap();
    let ms = |plan: &Plan| at(plan, 2).cost.unwrap().decode_one_ms;
    let waits = |plan: &Plan| across.decode_one.ms(&plan.workload.link);
    assert!((ms(&slower) - ms(&apart) - (waits(&slower) - waits(&apart))).abs() < 1e-6);

    let both = of(2, 2);
    let hosts = at(&both, 2).hosts.unwrap().hosts;
    assert_eq!(hosts[1].labels, ["PP1-TP0", "PP1-TP1"]);
    let stages = at(&both, 2).stages;
    let pages = at(&both, 2).memory.unwrap().pages;
    assert_eq!(hosts[0].committed_bytes, 2 * stages[0].memory.committed_bytes());
    assert_eq!(hosts[1].kv_bytes, 2 * pages * 16 * stages[1].memory.kv_bytes_per_token);
    let text = lockstep_planner::table::render(&staged);
    for words in
        ["hosts: 2 (--nnodes 2)", "tp across hosts", "- host 1 (--node-rank 1) has ranks 1 to 1 (PP1-TP0): "]
    {
        assert!(text.contains(words), "{words} is not in\n{text}");
    }
    let replicas = changed("qwen3-8b", "h200", |load| Workload { hosts: 2, replicas: 2, ..load });
    assert!(replicas.unwrap_err().to_string().contains("--dp 2 with --nnodes 2 is not possible"));
}
