// Browsers start no worker from a page that was opened as a file, and the search of the theme is one. There a hidden
// frame takes its place: it runs the same script and passes messages the same way.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inner = this.frame.contentWindow
      this.ready = new Promise(resolve => {
        inner.document.open()
        inner.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => new Promise((done, failed) => {
          const script = inner.document.createElement("script")
          Object.assign(script, {src: each, onload: done, onerror: failed})
          inner.document.body.appendChild(script)
        })), Promise.resolve())
        const answer = data => this.dispatchEvent(new MessageEvent("message", {data}))
        inner.document.write("<!doctype html><html><body></body></html>")
        inner.document.close()
        inner.postMessage = answer
        const script = inner.document.createElement("script")
        Object.assign(script, {src: new URL(url, location.href).href, onload: resolve})
        inner.document.body.appendChild(script)
      })
      this.inner = inner
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", {data})))
    }
    terminate() {
      this.frame.remove()
    }
    set onmessage(listener) {
      this.addEventListener("message", listener)
    }
  }
  window.Worker = window.IFrameWorker
}
