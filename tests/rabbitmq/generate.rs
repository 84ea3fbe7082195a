//! Real text over RabbitMQ. That a text is the same after a redelivery is in `src/worker/tests/kinds.rs`.

use std::path::Path;

use serde_json::json;

use super::messages::serve;
use crate::support::client::Task;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::Settings;

fn settings() -> Settings {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/smollm2-135m-instruct");
    let path = folder.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "{} is missing: run scripts/fetch-smollm2", path.display());
    Settings::echo(Rabbit::shared().url()).set("pool[0].model", path.display())
}

#[tokio::test(flavor = "multi_thread")]
async fn grammars_that_explode_are_refused_while_others_are_answered() {
    let settings = settings();
    let (sconce, client, mut inbox) = serve(&settings).await;
    let workers = sconce.workers();
    let hostile = |number: usize| {
        // A prime of its own for each, so that none is known from before.
        let prime = [4_000_037, 200_000_033, 100_000_007, 50_000_017, 15_485_863, 32_452_843][number % 6];
        let multiple = json!({"type": "integer", "multipleOf": prime, "minimum": number});
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": multiple}});
        Task::new(json!({"prompt": "a", "max_tokens": 8, "response_format": format}))
            .id(format!("hostile-{number}"))
            .header("url", "/v1/completions")
    };
    let innocent = |number: usize| {
        Task::new(json!({"prompt": "Count: one, two, three, four, five,", "max_tokens": 4, "temperature": 0}))
            .id(format!("innocent-{number}"))
            .header("url", "/v1/completions")
    };
    client.publish_all(&settings.tasks, (0..12).map(hostile)).await;
    client.publish_all(&settings.tasks, (0..4).map(innocent)).await;
    let replies = inbox.take(16).await;
    let place =
        |id: &str| replies.iter().position(|reply| reply.correlation_id == id).expect("one reply each");
    for reply in &replies {
        let (status, param) = (reply.status_code(), &reply.body["error"]["param"]);
        match reply.correlation_id.starts_with("hostile") {
            true => assert_eq!((status, param), (400, &json!("response_format")), "{reply:?}"),
            false => assert_eq!(status, 200, "{reply:?}"),
        }
    }
    let last = (0..4).map(|number| place(&format!("innocent-{number}"))).max().expect("four");
    assert!(last < place("hostile-11"), "the grammars are built beside the other tasks");
    assert_eq!(sconce.workers(), workers, "the same process");
}
