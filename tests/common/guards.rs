//! Guards that a test run can take out of the loaded schema, to see that the tests notice: AWA_WITHOUT=<name>, see
//! docs/guards.md. Each is a piece of the migrations' text and what stands there without the guard.

const GUARDS: &[(&str, &str, &str)] = &[("none", "", "")];

pub fn take_out(text: String) -> String {
    let Ok(name) = std::env::var("AWA_WITHOUT") else { return text };
    let parts: Vec<_> = GUARDS.iter().filter(|g| g.0 == name).collect();
    assert!(!parts.is_empty(), "no guard is named {name}");
    parts.iter().fold(text, |text, (_, with, without)| {
        assert!(text.contains(with), "guard {name} is not in the migrations as written here");
        text.replace(with, without)
    })
}
