//! `awactl bench` without a checkout: scenarios that are built in, and the server it is measured on.

mod cli_common;

use cli_common::awactl;
use serde_json::json;

#[test]
fn built_in_scenarios_are_listed_shown_and_run_from_any_folder() {
    // Nothing is looked for in the folder scenarios/.
    let listed = awactl(&[], &["bench", "list", "-o", "json"]).json();
    assert!(listed.as_array().unwrap().iter().all(|l| l["built_in"] == true && l["file"].is_null()), "{listed}");
    assert!(listed.as_array().unwrap().iter().any(|l| l["name"] == "pickup-latency"), "{listed}");

    let dir = tempfile::tempdir().unwrap();
    let shown = awactl(&[], &["bench", "show", "pickup-latency"]).stdout;
    std::fs::write(dir.path().join("mine.yaml"), &shown).unwrap();
    let listed = awactl(&[], &["bench", "list", dir.path().to_str().unwrap()]).stdout;
    assert!(listed.contains("built in") && listed.contains("mine.yaml"), "{listed}");

    let kept = dir.path().join("server");
    let embedded = format!("--embedded={}", kept.display());
    let ran = awactl(&[], &[&embedded, "bench", "run", "pickup-latency", "--time-scale", "0.005", "-o", "json"]);
    assert!(matches!(ran.code, 0 | 1), "{ran:?}");
    let server = &ran.json()["server"];
    assert_eq!(server["shared_buffers"], json!("256MB"), "as documented: {server}");
}

#[test]
fn a_scenario_that_is_nowhere_is_answered_with_those_that_are_built_in() {
    for (name, said) in
        [("pickup", "throughput-1x256"), ("./pickup-latency", "cannot be read"), ("x.yaml", "cannot be read")]
    {
        let ran = awactl(&[], &["bench", "run", name]);
        assert!(ran.code == 2 && ran.stderr.contains(said), "{name}: {ran:?}");
    }
}
